"""Downloads one blob in chunks from several sources at once.

`planner.py` decides which chunk to request from which source next; `chunk_file.py` stores and verifies chunks on the
disk; `sources.py` requests a chunk over HTTP; `download.py` drives the three. The controller and the worker decide who
may be a source.
"""
