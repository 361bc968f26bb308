"""Before: create the table of the largest memory use measured per model; 0013 replaces it."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None

_NAME = sa.Text().with_variant(sa.Text(collation="C"), "postgresql")


def upgrade() -> None:
    op.create_table(
        "model_peaks",
        sa.Column("model", _NAME, nullable=False),
        sa.Column("revision", sa.Text, nullable=False),
        sa.Column("peak_bytes", sa.BigInteger, nullable=False),
        sa.ForeignKeyConstraint(["model"], ["models.id"], name="fk_model_peaks_model", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("model", "revision", name="pk_model_peaks"),
    )
