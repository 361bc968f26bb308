"""Before: create the table that says which node has which model file."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "node_files",
        sa.Column("node_id", sa.Text, nullable=False),
        sa.Column("digest", sa.Text, nullable=False),
        sa.Column("seen_at", sa.BigInteger, nullable=False),
        sa.ForeignKeyConstraint(["node_id"], ["nodes.id"], name="fk_node_files_node_id", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("node_id", "digest", name="pk_node_files"),
    )
