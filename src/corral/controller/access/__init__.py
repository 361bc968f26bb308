"""Who may do what: API keys, web sessions, join tokens, the cluster's signing key, certificates, bus credentials."""
