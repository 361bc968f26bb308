"""Unpacking what strangers packed. `tree.py` decides where each entry may go, `unpack.py` puts it there."""
