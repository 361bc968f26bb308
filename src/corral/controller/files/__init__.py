"""The files of models: found, fetched to this controller once, and offered to workers by digest.

Start with `model_files.py`. `wanted.py` says which files a definition means (pure), `origins.py` where their bytes are,
`door.py` is the port workers fetch from. Moving bytes, resuming and verifying are `blobs/`'s.
"""
