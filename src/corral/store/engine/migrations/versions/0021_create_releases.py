"""Before: create the tables of releases: their orders, their wheels, and the keys that sign them."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0021"
down_revision = "0020"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "releases",
        sa.Column("counter", sa.BigInteger, autoincrement=False, nullable=False),
        sa.Column("version", sa.Text, nullable=False),
        sa.Column("sha256", sa.Text, nullable=False),
        sa.Column("size_bytes", sa.BigInteger, nullable=False),
        sa.Column("signed", sa.Text, nullable=False),
        sa.Column("created_at", sa.BigInteger, nullable=False),
        sa.Column("created_by", sa.Text, nullable=False),
        sa.PrimaryKeyConstraint("counter", name="pk_releases"),
    )
    op.create_table(
        "release_wheels",
        sa.Column("sha256", sa.Text, nullable=False),
        sa.Column("content", sa.LargeBinary, nullable=False),
        sa.Column("created_at", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("sha256", name="pk_release_wheels"),
    )
    op.create_table(
        "release_keys",
        sa.Column("number", sa.BigInteger, autoincrement=False, nullable=False),
        sa.Column("public_key", sa.Text, nullable=False),
        sa.Column("proof", sa.Text, nullable=False),
        sa.Column("created_at", sa.BigInteger, nullable=False),
        sa.Column("created_by", sa.Text, nullable=False),
        sa.PrimaryKeyConstraint("number", name="pk_release_keys"),
    )
