"""The data plane: one public port, keys checked in memory, bytes relayed to whoever should answer."""
