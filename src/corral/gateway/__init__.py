"""The data plane: one public port. Checks keys in memory and relays requests to replicas or to the controller."""
