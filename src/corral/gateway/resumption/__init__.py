"""Continues broken streams on another replica: the pure parts. `http/stream_resumer.py` is the shell (ADR 50)."""
