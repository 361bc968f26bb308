"""Gives Corral itself to other machines: its wheel, the locked list of its dependencies, and the installer."""
