"""The first schema: nodes, access, leases, and the state that controllers share."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "api_keys",
        _text("id"),
        _text("name"),
        _text("secret_hash"),
        _text("role"),
        _moment("created_at"),
        _text("models", nullable=True),
        _text("limits", nullable=True),
        _moment("expires_at", nullable=True),
        _moment("revoked_at", nullable=True),
        _moment("last_used_at", nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_api_keys"),
        sa.UniqueConstraint("secret_hash", name="uq_api_keys_secret_hash"),
    )
    op.create_table(
        "bus_credentials",
        _text("user_key"),
        _text("node_id"),
        _text("kind"),
        _moment("issued_at"),
        _moment("expires_at"),
        _moment("revoked_at", nullable=True),
        sa.PrimaryKeyConstraint("user_key", name="pk_bus_credentials"),
    )
    op.create_index("ix_bus_credentials_node_id", "bus_credentials", ["node_id"])
    op.create_index("ix_bus_credentials_expires_at", "bus_credentials", ["expires_at"])
    op.create_table(
        "cluster_secrets",
        _text("name"),
        _text("value"),
        _moment("created_at"),
        sa.PrimaryKeyConstraint("name", name="pk_cluster_secrets"),
    )
    op.create_table(
        "controllers",
        _text("id"),
        _text("host"),
        _text("version"),
        _moment("started_at"),
        _moment("seen_at"),
        sa.PrimaryKeyConstraint("id", name="pk_controllers"),
    )
    op.create_table(
        "join_tokens",
        _text("id"),
        _text("name"),
        _text("secret_hash"),
        _moment("created_at"),
        _text("created_by"),
        _number("uses_left", nullable=True),
        _number("uses"),
        _flag("pre_approved"),
        _moment("expires_at", nullable=True),
        _moment("revoked_at", nullable=True),
        _moment("last_used_at", nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_join_tokens"),
        sa.UniqueConstraint("secret_hash", name="uq_join_tokens_secret_hash"),
    )
    op.create_table(
        "leases",
        _text("name"),
        _text("holder"),
        _number("epoch"),
        _moment("expires_at"),
        sa.PrimaryKeyConstraint("name", name="pk_leases"),
    )
    op.create_table(
        "node_tombstones",
        _text("node_id"),
        _name("name"),
        _text("token_hash"),
        _text("enrolment_hash"),
        _moment("deleted_at"),
        sa.PrimaryKeyConstraint("node_id", name="pk_node_tombstones"),
    )
    op.create_index("ix_node_tombstones_name", "node_tombstones", ["name"])
    op.create_index("ix_node_tombstones_token_hash", "node_tombstones", ["token_hash"])
    op.create_table(
        "nodes",
        _text("id"),
        _name("name"),
        _moment("created_at"),
        _moment("updated_at"),
        _moment("status_changed_at"),
        _moment("last_heartbeat", nullable=True),
        _number("row_version"),
        _text("node_type"),
        _text("status"),
        _text("status_reason"),
        _flag("approved"),
        _flag("drained"),
        _flag("left"),
        _text("address"),
        _text("http_address"),
        _text("ingress_url"),
        _flag("ingress_ok", nullable=True),
        _text("ingress_error"),
        _flag("bus_down"),
        _small("protocol"),
        _text("auth"),
        _text("token_hash"),
        _text("enrolment_hash"),
        _text("boot_id"),
        _text("version"),
        _text("os"),
        _text("arch"),
        _text("gpu_vendor"),
        _text("gpu_compute_capability"),
        _text("capability"),
        _text("devices"),
        _number("total_vram"),
        _number("available_vram"),
        _number("reserved_vram"),
        _number("total_ram"),
        _number("available_ram"),
        _number("total_disk"),
        _number("available_disk"),
        _small("max_replicas_per_model"),
        _flag("max_replicas_per_model_manually_set"),
        _text("vram_budget"),
        _number("vram_budget_bytes"),
        _flag("vram_budget_manually_set"),
        sa.PrimaryKeyConstraint("id", name="pk_nodes"),
        sa.UniqueConstraint("name", name="uq_nodes_name"),
        postgresql_with={"fillfactor": "50"},
    )
    op.create_index("ix_nodes_token_hash", "nodes", ["token_hash"])
    op.create_table(
        "revisions",
        _text("kind"),
        _number("value"),
        sa.PrimaryKeyConstraint("kind", name="pk_revisions"),
    )
    op.create_table(
        "settings_kv",
        _text("key"),
        _text("value"),
        _moment("updated_at"),
        sa.PrimaryKeyConstraint("key", name="pk_settings_kv"),
    )
    op.create_table(
        "web_sessions",
        _text("id_hash"),
        _text("key_id"),
        _text("csrf"),
        _moment("created_at"),
        _moment("expires_at"),
        _moment("last_seen_at"),
        sa.PrimaryKeyConstraint("id_hash", name="pk_web_sessions"),
    )
    op.create_index("ix_web_sessions_key_id", "web_sessions", ["key_id"])
    op.create_index("ix_web_sessions_expires_at", "web_sessions", ["expires_at"])
    op.create_table(
        "node_labels",
        _text("node_id"),
        _text("key"),
        _text("value"),
        _text("origin"),
        sa.ForeignKeyConstraint(["node_id"], ["nodes.id"], name="fk_node_labels_node_id", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("node_id", "key", name="pk_node_labels"),
    )


def _text(name: str, *, nullable: bool = False) -> sa.Column[Any]:
    return sa.Column(name, sa.Text, nullable=nullable)


def _name(name: str) -> sa.Column[Any]:
    return sa.Column(name, sa.Text().with_variant(sa.Text(collation="C"), "postgresql"), nullable=False)


def _moment(name: str, *, nullable: bool = False) -> sa.Column[Any]:
    return sa.Column(name, sa.BigInteger, nullable=nullable)


def _number(name: str, *, nullable: bool = False) -> sa.Column[Any]:
    return sa.Column(name, sa.BigInteger, nullable=nullable)


def _small(name: str) -> sa.Column[Any]:
    return sa.Column(name, sa.Integer, nullable=False)


def _flag(name: str, *, nullable: bool = False) -> sa.Column[Any]:
    return sa.Column(name, sa.Boolean, nullable=nullable)
