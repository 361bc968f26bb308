"""NATS: connection, calls, events, auth, embedded server. `local.py` is its in-process twin.

Start with `api.py`, the interface; `core.py` has what `nats.py` and `local.py` share; `nats.py` keeps the connection.
"""
