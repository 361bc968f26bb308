"""When a node itself last told which orders it is at: what an answer or a heartbeat over HTTP does not tell."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("node_backends", sa.Column("told_at", sa.BigInteger, nullable=True))
