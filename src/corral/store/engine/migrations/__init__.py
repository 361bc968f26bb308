"""Alembic's scripts. `engine/migrate.py` runs them and explains *before* and *after*."""
