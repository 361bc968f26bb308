"""Before: create the table of processes on workers that offer only a gRPC address."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None

_NAME = sa.Text().with_variant(sa.Text(collation="C"), "postgresql")


def upgrade() -> None:
    op.create_table(
        "peer_processes",
        sa.Column("process_id", sa.Text, nullable=False),
        sa.Column("node_id", sa.Text, nullable=False),
        sa.Column("model", _NAME, nullable=False),
        sa.Column("replica", sa.BigInteger, nullable=False),
        sa.Column("revision", sa.Text, nullable=False),
        sa.Column("backend", sa.Text, nullable=False),
        sa.Column("address", sa.Text, nullable=False),
        sa.Column("state", sa.Text, nullable=False),
        sa.Column("load", sa.Text, nullable=False),
        sa.Column("definition", sa.Text, nullable=False),
        sa.Column("started_at", sa.BigInteger, nullable=False),
        sa.Column("ready_at", sa.BigInteger, nullable=False),
        sa.Column("slots", sa.BigInteger, nullable=False),
        sa.Column("devices", sa.Text, nullable=False),
        sa.Column("memory_bytes", sa.BigInteger, nullable=False),
        sa.Column("error", sa.Text, nullable=False),
        sa.ForeignKeyConstraint(["node_id"], ["nodes.id"], name="fk_peer_processes_node_id", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("process_id", name="pk_peer_processes"),
    )
    op.create_index("ix_peer_processes_node_id", "peer_processes", ["node_id"])
