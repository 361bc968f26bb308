"""`corral backup` and `corral restore`.

`parts.py` decides which files of a data folder belong to a backup, `archive.py` writes and reads the file of a backup,
`seal.py` seals it, `restore.py` puts everything in its place.
"""
