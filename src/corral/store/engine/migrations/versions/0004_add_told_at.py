"""Before: add the time of a node's last own report of its orders; a reply or an HTTP heartbeat reports no orders."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("node_backends", sa.Column("told_at", sa.BigInteger, nullable=True))
