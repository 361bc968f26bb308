"""Before: add the node's Python version, by which wheels are chosen, and the processes to inventories."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("nodes", sa.Column("python", sa.Text, nullable=False, server_default=""))
    op.add_column("node_backends", sa.Column("processes", sa.Text, nullable=False, server_default="[]"))
    # Made anew, empty: a key cannot be changed on SQLite, and what a rule means where no target says is looked up.
    op.drop_table("backend_targets")
    op.create_table(
        "backend_targets",
        *(sa.Column(name, sa.Text, nullable=False) for name in ("id", "capability", "platform", "python")),
        sa.Column("resolved_at", sa.BigInteger, nullable=False),
        sa.Column("build", sa.Text, nullable=True),
        sa.Column("reason", sa.Text, nullable=False),
        sa.PrimaryKeyConstraint("id", "capability", "platform", "python", name="pk_backend_targets"),
    )
