"""Before: create the table of model files with their resolved address, digest and size."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None

_NAME = sa.Text().with_variant(sa.Text(collation="C"), "postgresql")


def upgrade() -> None:
    op.create_table(
        "model_files",
        *(sa.Column(name, _NAME, nullable=False) for name in ("model", "path")),
        *(sa.Column(name, sa.Text, nullable=False) for name in ("uri", "resolved", "digest")),
        *(sa.Column(name, sa.BigInteger, nullable=False) for name in ("size_bytes", "fetched_at")),
        sa.ForeignKeyConstraint(["model"], ["models.id"], name="fk_model_files_model", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("model", "path", name="pk_model_files"),
    )
