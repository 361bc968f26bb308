"""The worker's one port: who may come in, and where each route leads."""
