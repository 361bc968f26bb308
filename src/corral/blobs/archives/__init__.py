"""Unpacks untrusted archives. `tree.py` decides where each entry may go, `unpack.py` writes it there."""
