"""`corral doctor`: finds problems of this machine and of the fleet, and shows how to fix them.

`machine_checks.py` checks this machine and the data folder, `port_checks.py` the ports, `fleet_checks.py` the running
fleet through its API, `bus_check.py` whether the bus refuses clients without credentials. Checks change nothing.
"""
