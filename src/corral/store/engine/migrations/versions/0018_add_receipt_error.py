"""Before: add what failed to the receipt of each request."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0018"
down_revision = "0017"
branch_labels = None
depends_on = None


def upgrade() -> None:
    for name in ("error", "error_text"):
        op.add_column("receipts", sa.Column(name, sa.Text, nullable=False, server_default=""))
