"""Before: create the table of rollouts."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0017"
down_revision = "0016"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "rollouts",
        sa.Column("operation_id", sa.Text, nullable=False),
        sa.Column("generation", sa.BigInteger, nullable=False),
        sa.Column("subject", sa.Text, nullable=False),
        sa.Column("phase", sa.Text, nullable=False),
        sa.Column("settings", sa.Text, nullable=False),
        sa.Column("started_at", sa.BigInteger, nullable=False),
        sa.Column("ticked_at", sa.BigInteger),
        sa.Column("ended_at", sa.BigInteger),
        sa.Column("paused_by", sa.Text, nullable=False),
        sa.Column("promoted_by", sa.Text, nullable=False),
        sa.Column("aborted_by", sa.Text, nullable=False),
        sa.Column("verdict", sa.Text, nullable=False),
        sa.Column("reverted_by", sa.Text, nullable=False),
        sa.Column("classes", sa.Text, nullable=False),
        sa.Column("nodes", sa.Text, nullable=False),
        sa.ForeignKeyConstraint(
            ["operation_id"], ["operations.id"], name="fk_rollouts_operation_id", ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("operation_id", name="pk_rollouts"),
    )
    op.create_index("ix_rollouts_phase", "rollouts", ["phase"])
