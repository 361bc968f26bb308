"""Connections, transactions, claims, leases and migrations. The engine knows no table except `leases`."""
