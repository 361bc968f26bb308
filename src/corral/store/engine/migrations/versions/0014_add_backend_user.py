"""Before: add the user that backends run as on each node, and what is wrong with that user."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0013"
branch_labels = None
depends_on = None


def upgrade() -> None:
    for name in ("backend_user", "backend_user_warning", "backend_user_fix"):
        op.add_column("nodes", sa.Column(name, sa.Text, nullable=False, server_default=""))
