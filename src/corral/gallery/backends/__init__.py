"""Backends in galleries: the entries of an index, the build that suits a machine, its exact sources, its upgrades.

`resolver.py` is the entry point; `catalogue.py`, `compatibility.py`, `variants.py` and `upgrades.py` are pure.
"""
