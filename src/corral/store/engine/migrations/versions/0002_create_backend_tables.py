"""Before: create the tables of backends (rules, targets, intents, inventories) and of operations with their nodes."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "backend_rules",
        sa.Column("generation", sa.BigInteger, nullable=False, autoincrement=False),
        *_texts("operation_id", "scope_kind", "scope_value", "backend", "want", "target"),
        _moment("created_at"),
        *_texts("asked", "origin"),
        _flag("force"),
        *_texts("max_parallel", "excluded"),
        _moment("withdrawn_at", nullable=True),
        sa.PrimaryKeyConstraint("generation", name="pk_backend_rules"),
    )
    op.create_index("ix_backend_rules_operation_id", "backend_rules", ["operation_id"])
    op.create_index("ix_backend_rules_backend", "backend_rules", ["backend"])
    op.create_table(
        "backend_targets",
        *_texts("id", "capability", "platform"),
        _moment("resolved_at"),
        sa.Column("build", sa.Text, nullable=True),
        *_texts("reason"),
        sa.PrimaryKeyConstraint("id", "capability", "platform", name="pk_backend_targets"),
    )
    op.create_table(
        "backend_intents",
        *_texts("node_id", "backend", "kind", "stage"),
        _number("generation"),
        *_texts("operation_id"),
        _number("attempt"),
        _moment("updated_at"),
        *_texts("variant", "digest"),
        _number("failures"),
        *_texts("reason"),
        _moment("next_try_at", nullable=True),
        _number("epoch"),
        _moment("sent_at", nullable=True),
        _moment("accepted_at", nullable=True),
        *_texts("boot_id", "before"),
        _flag("running"),
        _flag("answered"),
        _flag("switch_failed"),
        sa.ForeignKeyConstraint(["node_id"], ["nodes.id"], name="fk_backend_intents_node_id", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("node_id", "backend", name="pk_backend_intents"),
    )
    op.create_index("ix_backend_intents_generation", "backend_intents", ["generation"])
    op.create_index("ix_backend_intents_next_try_at", "backend_intents", ["next_try_at"])
    op.create_table(
        "operations",
        *_texts("id", "kind", "backend", "scope_kind", "scope_value"),
        _number("generation"),
        _moment("created_at"),
        *_texts("request", "created_by"),
        _moment("cancelled_at", nullable=True),
        _moment("withdrawn_at", nullable=True),
        _moment("finished_at", nullable=True),
        *_texts("outcome", "error"),
        _flag("dismissed"),
        _flag("in_history"),
        sa.PrimaryKeyConstraint("id", name="pk_operations"),
    )
    op.create_index("ix_operations_finished_at", "operations", ["finished_at"])
    op.create_table(
        "operation_nodes",
        *_texts("operation_id", "node_id"),
        sa.Column("node_name", sa.Text().with_variant(sa.Text(collation="C"), "postgresql"), nullable=False),
        *_texts("status"),
        _moment("updated_at"),
        *_texts("reason", "phase", "file_name"),
        sa.Column("percentage", sa.Float, nullable=False),
        _number("current_bytes"),
        _number("total_bytes"),
        sa.Column("rate", sa.Float, nullable=False),
        _number("attempt"),
        _number("seq"),
        _number("failures"),
        _moment("next_try_at", nullable=True),
        _flag("waits"),
        *_texts("variant", "version", "digest"),
        sa.ForeignKeyConstraint(
            ["operation_id"], ["operations.id"], name="fk_operation_nodes_operation_id", ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("operation_id", "node_id", name="pk_operation_nodes"),
    )
    op.create_index("ix_operation_nodes_node_id", "operation_nodes", ["node_id"])
    op.create_table(
        "node_backends",
        *_texts("node_id", "boot_id"),
        _number("seq"),
        _moment("seen_at"),
        *_texts("backends", "orders", "fingerprint"),
        sa.ForeignKeyConstraint(["node_id"], ["nodes.id"], name="fk_node_backends_node_id", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("node_id", name="pk_node_backends"),
    )
    op.create_index("ix_node_backends_seen_at", "node_backends", ["seen_at"])


def _texts(*names: str) -> list[sa.Column[Any]]:
    return [sa.Column(name, sa.Text, nullable=False) for name in names]


def _moment(name: str, *, nullable: bool = False) -> sa.Column[Any]:
    return sa.Column(name, sa.BigInteger, nullable=nullable)


def _number(name: str) -> sa.Column[Any]:
    return sa.Column(name, sa.BigInteger, nullable=False)


def _flag(name: str) -> sa.Column[Any]:
    return sa.Column(name, sa.Boolean, nullable=False)
