"""`corral backup`, `corral restore` and `corral support-bundle`.

`parts.py` decides which files of a data folder belong to a backup, `archive.py` writes and reads the file of a backup,
`seal.py` seals it, `restore.py` puts everything in its place. `support_bundle.py` collects, `masking.py` takes secrets
out of it.
"""
