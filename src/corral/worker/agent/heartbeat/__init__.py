"""Heartbeats: `loop.py` sends them, `reporter.py` collects their content."""
