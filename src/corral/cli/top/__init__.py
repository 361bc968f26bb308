"""`corral top`: the fleet in a terminal. `state.py` holds what is known, `tables.py`, `overview.py` and `frame.py` make
lines of it, `screen_state.py` decides what keys do (all pure). `feed.py` and `details.py` talk to the fleet, `app.py`
runs the terminal."""
