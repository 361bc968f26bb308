"""Controllers tell where their copies of model files are served."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("controllers", sa.Column("blob_url", sa.Text, nullable=False, server_default=""))
