"""Replaces a running worker by a new one: `handover.py` passes the sockets on, `keeper.py` keeps the process id."""
