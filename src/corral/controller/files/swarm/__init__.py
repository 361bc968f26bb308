"""Blobs between workers, as the controller sees them: who has what, and whom to ask."""
