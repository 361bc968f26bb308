"""Backend processes of this machine. Read `supervisor.py` first; `shim.py` is what stays when the worker goes."""
