"""`corral up`: starts, supervises and stops the four processes of a fleet on one machine.

`command.py` has the main flow; `prepare.py` creates folders, secrets and certificates; `children.py` computes commands
and settings of the processes (pure); `startup.py` starts them in order and prints how to use the fleet; `supervisor.py`
restarts them; `guard.py` runs in each child before it executes its command.
"""
