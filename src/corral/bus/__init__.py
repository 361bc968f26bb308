"""NATS: connection, calls, events, auth, embedded server. `local.py` is its in-process twin.

`api.py` says what the other rooms may count on; read `core.py` for what both twins share and `nats.py` for how a
connection is kept alive for ever.
"""
