"""Replaces the Corral of a worker by another version, and returns to the old one when that is not healthy in time
(docs/adr/0039-a-worker-tries-a-new-version.md)."""
