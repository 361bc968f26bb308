"""Before: keep the last changes of status of each node, and the last definitions of each model."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0016"
down_revision = "0015"
branch_labels = None
depends_on = None

_NAME = sa.Text().with_variant(sa.Text(collation="C"), "postgresql")


def upgrade() -> None:
    op.create_table(
        "node_events",
        sa.Column("node_id", sa.Text, nullable=False),
        sa.Column("at", sa.BigInteger, nullable=False),
        sa.Column("status", sa.Text, nullable=False),
        sa.Column("reason", sa.Text, nullable=False),
        sa.PrimaryKeyConstraint("node_id", "at", name="pk_node_events"),
    )
    op.create_table(
        "model_revisions",
        sa.Column("model", _NAME, nullable=False),
        sa.Column("row_version", sa.BigInteger, nullable=False),
        sa.Column("at", sa.BigInteger, nullable=False),
        sa.Column("revision", sa.Text, nullable=False),
        sa.Column("definition", sa.Text, nullable=False),
        sa.ForeignKeyConstraint(["model"], ["models.id"], name="fk_model_revisions_model", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("model", "row_version", name="pk_model_revisions"),
    )
