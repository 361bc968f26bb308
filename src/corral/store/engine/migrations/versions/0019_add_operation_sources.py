"""Before: keep from where the nodes of an operation received their data."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0019"
down_revision = "0018"
branch_labels = None
depends_on = None


def upgrade() -> None:
    for name, empty in (("sources", "{}"), ("bad_sources", "[]")):
        op.add_column("operation_nodes", sa.Column(name, sa.Text, nullable=False, server_default=empty))
