"""Become a node of the cluster: identity, trust, registration, credentials of the bus. Read `registrar.py` first."""
