"""Artifacts of backends (layers, archives, wheels): fetched once to this controller, and served to workers by digest.

Start with `service.py`, which answers a worker. `listings.py` finds out the blobs of a source, `fetches.py` downloads
them, `cache.py` limits the disk space that they take.
"""
