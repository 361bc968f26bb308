"""`corral nodes`, `token`, `join` and the roles: the machines of a fleet, and how a machine joins it."""
