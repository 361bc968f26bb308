"""Alembic's scripts. Their names are `NNNN_before_what.py` and `NNNN_after_what.py`; see `store/migrate.py`."""
