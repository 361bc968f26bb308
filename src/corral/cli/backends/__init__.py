"""`corral backends`: inference engines on the nodes."""
