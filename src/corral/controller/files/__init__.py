"""The files of models: resolved, fetched to this controller once, and served to workers by digest.

Start with `model_files.py`. `required_files.py` finds the files of a definition (pure), `file_resolver.py` their
sources; `blob_listener.py` is the port from which workers fetch. `blobs/` transfers, resumes and verifies.
"""
