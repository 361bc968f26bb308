"""`corral ops`: operations, followed until they settle. `backends` and `models` follow theirs with this package."""
