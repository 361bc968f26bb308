"""Alembic's entry point. `engine/migrate.py` passes the connection, in a transaction that already holds the lock."""

from __future__ import annotations

from alembic import context

from corral.store.engine.migrate import VERSION_TABLE

context.configure(connection=context.config.attributes["connection"], version_table=VERSION_TABLE)
with context.begin_transaction():
    context.run_migrations()
