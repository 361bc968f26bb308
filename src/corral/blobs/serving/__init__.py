"""Blobs to other machines, by digest: `asked.py` reads a request and says what it gets, `server.py` sends it."""
