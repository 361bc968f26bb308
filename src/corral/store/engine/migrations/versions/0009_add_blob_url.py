"""Before: add the address at which each controller serves its copies of model files."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("controllers", sa.Column("blob_url", sa.Text, nullable=False, server_default=""))
