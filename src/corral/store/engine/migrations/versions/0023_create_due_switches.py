"""Before: create the table of nodes that wait for other nodes to take over their models."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0023"
down_revision = "0022"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "due_switches",
        sa.Column("node_id", sa.Text, nullable=False),
        sa.Column("backend", sa.Text, nullable=False),
        sa.Column("operation_id", sa.Text, nullable=False),
        sa.Column("since", sa.BigInteger, nullable=False),
        sa.Column("models", sa.Text, nullable=False),
        sa.Column("refusals", sa.Text, nullable=False),
        sa.ForeignKeyConstraint(["node_id"], ["nodes.id"], name="fk_due_switches_node_id", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("node_id", "backend", name="pk_due_switches"),
    )
