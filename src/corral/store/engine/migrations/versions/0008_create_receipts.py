"""Before: create the table of receipts: one row per request for a model, with its outcome."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    texts = ("path", "served_by", "node_id", "process_id", "revision", "digest", "ending")
    numbers = ("status", "replica", "queue_us", "load_us", "first_byte_us", "total_us")
    op.create_table(
        "receipts",
        sa.Column("at", sa.BigInteger, nullable=False, autoincrement=False),
        sa.Column("id", sa.Text, nullable=False),
        sa.Column("key_id", sa.Text, nullable=False),
        sa.Column("model", sa.Text, nullable=False),
        *(sa.Column(name, sa.Text, nullable=False) for name in texts),
        *(sa.Column(name, sa.BigInteger, nullable=False) for name in numbers),
        *(sa.Column(name, sa.BigInteger, nullable=False) for name in ("prompt_tokens", "completion_tokens", "tries")),
        *(sa.Column(name, sa.Boolean, nullable=False) for name in ("estimated", "streamed")),
        sa.PrimaryKeyConstraint("at", "id", name="pk_receipts"),
    )
    op.create_index("ix_receipts_model_at", "receipts", ["model", "at"])
    op.create_index("ix_receipts_key_id_at", "receipts", ["key_id", "at"])
