"""Before: measure memory per process instead of one maximum per model. No release had `model_peaks`: drop it."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None

_NAME = sa.Text().with_variant(sa.Text(collation="C"), "postgresql")


def upgrade() -> None:
    op.drop_table("model_peaks")
    op.create_table(
        "process_peaks",
        sa.Column("model", _NAME, nullable=False),
        sa.Column("revision", sa.Text, nullable=False),
        sa.Column("process_id", sa.Text, nullable=False),
        sa.Column("seen_at", sa.BigInteger, nullable=False),
        sa.Column("ram_bytes", sa.BigInteger, nullable=False),
        sa.Column("device_bytes", sa.BigInteger, nullable=False),
        sa.Column("devices", sa.BigInteger, nullable=False),
        sa.ForeignKeyConstraint(["model"], ["models.id"], name="fk_process_peaks_model", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("model", "revision", "process_id", name="pk_process_peaks"),
    )
