"""Serves blobs to other machines by digest: `http_request.py` parses a request, `server.py` answers it."""
