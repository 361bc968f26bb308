"""Before: add to the receipt of each request how often its stream was resumed."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0020"
down_revision = "0019"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("receipts", sa.Column("resumed", sa.BigInteger, nullable=False, server_default="0"))
