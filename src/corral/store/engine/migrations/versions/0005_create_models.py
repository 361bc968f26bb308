"""Before: create the tables of models and of their schedules (how many replicas each model should have)."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

_NAME = sa.Text().with_variant(sa.Text(collation="C"), "postgresql")


def upgrade() -> None:
    op.create_table(
        "models",
        sa.Column("id", _NAME, nullable=False),
        *_texts("definition", "revision", "origin"),
        *_numbers("created_at", "updated_at"),
        *_texts("source", "created_by"),
        *_numbers("row_version"),
        *_texts("formers"),
        sa.PrimaryKeyConstraint("id", name="pk_models"),
    )
    op.create_table(
        "model_schedules",
        sa.Column("model", _NAME, nullable=False),
        *_texts("id"),
        *_numbers("created_at", "updated_at"),
        *_texts("node_selector"),
        *_numbers("min_replicas", "max_replicas"),
        sa.Column("spread_all", sa.Boolean, nullable=False),
        *_texts("route_policy"),
        *_numbers("balance_abs_threshold"),
        sa.Column("balance_rel_threshold", sa.Float, nullable=False),
        sa.Column("min_prefix_match", sa.Float, nullable=False),
        *_numbers("unsatisfiable_ticks"),
        sa.Column("unsatisfiable_until", sa.BigInteger, nullable=True),
        sa.PrimaryKeyConstraint("model", name="pk_model_schedules"),
    )


def _texts(*names: str) -> list[sa.Column[Any]]:
    return [sa.Column(name, sa.Text, nullable=False) for name in names]


def _numbers(*names: str) -> list[sa.Column[Any]]:
    return [sa.Column(name, sa.BigInteger, nullable=False) for name in names]
