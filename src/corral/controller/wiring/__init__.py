"""Assembles each subsystem from the settings; `main.py` puts the subsystems together."""
