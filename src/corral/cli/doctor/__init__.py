"""`corral doctor`: looks at everything a fleet stands on, and says how to mend what is wrong.

`machine_checks.py` looks at this machine and the data folder, `fleet_checks.py` asks the running fleet, `bus_door.py`
knocks at the bus as a stranger would. Each check gives findings; none changes anything.
"""
