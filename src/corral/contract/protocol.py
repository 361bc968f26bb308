"""The number two Corral peers compare. Types only grow; a changed meaning is a new subject."""

PROTOCOL = 1  # 2026-11: registration, heartbeats on the bus, signed ingress tokens, the gateway's view
