"""Backend processes of this machine. Read `supervisor.py` first; `shim.py` runs on when the worker ends."""
