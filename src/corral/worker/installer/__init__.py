"""Backends on this machine's disk: versions side by side, a pointer to the current one, nothing half there.

Start with `installer.py`. How content is fetched and unpacked is `blobs`'s, which source it comes from the gallery's,
what runs from a version's folder the supervisor's. The layout is described in docs/reference/backends-on-disk.md.
"""
