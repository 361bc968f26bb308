"""Before: create the tables of desired replicas and of loads that requests wait for."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None

_NAME = sa.Text().with_variant(sa.Text(collation="C"), "postgresql")


def upgrade() -> None:
    op.create_table(
        "replicas",
        *_texts("node_id"),
        sa.Column("model", _NAME, nullable=False),
        sa.Column("replica", sa.BigInteger, nullable=False, autoincrement=False),
        *_texts("revision", "backend", "stage", "op_id", "process_id"),
        *_numbers("created_at", "updated_at", "attempt"),
        *_texts("devices"),
        *_numbers("memory_bytes"),
        sa.Column("files", sa.Text, nullable=True),
        *_texts("reason", "error"),
        *_moments("next_try_at"),
        *_numbers("epoch"),
        *_moments("sent_at", "accepted_at"),
        *_texts("boot_id"),
        *_moments("ready_at", "last_used_at", "leaving_at"),
        *_numbers("stop_attempt"),
        sa.Column("force", sa.Boolean, nullable=False),
        sa.ForeignKeyConstraint(["node_id"], ["nodes.id"], name="fk_replicas_node_id", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("node_id", "model", "replica", name="pk_replicas"),
    )
    op.create_index("ix_replicas_model", "replicas", ["model"])
    op.create_table(
        "load_jobs",
        sa.Column("model", _NAME, nullable=False),
        *_texts("state"),
        *_numbers("created_at", "updated_at", "version"),
        *_texts("revision", "node_id"),
        sa.Column("node_name", _NAME, nullable=False),
        *_texts("message"),
        *_numbers("bytes_sent", "total_bytes", "file_index", "total_files"),
        *_moments("moving_since"),
        *_texts("error"),
        *_numbers("failures"),
        *_texts("failed_on"),
        *_moments("failed_at", "retry_at"),
        *_texts("operation_id"),
        sa.PrimaryKeyConstraint("model", name="pk_load_jobs"),
    )


def _texts(*names: str) -> list[sa.Column[Any]]:
    return [sa.Column(name, sa.Text, nullable=False) for name in names]


def _numbers(*names: str) -> list[sa.Column[Any]]:
    return [sa.Column(name, sa.BigInteger, nullable=False) for name in names]


def _moments(*names: str) -> list[sa.Column[Any]]:
    return [sa.Column(name, sa.BigInteger, nullable=True) for name in names]
