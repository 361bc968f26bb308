"""`corral up`: four processes of one fleet on one machine, started, watched and stopped together.

`command.py` is the story; `prepare.py` makes folders, secrets and certificates; `children.py` says what to start with
which settings (pure); `supervisor.py` keeps it running; `guard.py` runs in each child before it becomes what it is.
"""
