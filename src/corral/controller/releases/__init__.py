"""Releases of Corral that the fleet installs by itself: keys, wheels, plans and orders. Start with `upgrades.py`."""
