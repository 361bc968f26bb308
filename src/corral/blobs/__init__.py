"""Content by digest: fetch with resume, verify, unpack safely, keep. Controller and worker share this room.

Start with `contents.py`: it opens any `Source` and writes it into a folder. What a backend is, which version is current
and who may use it is the installer's; which source to fetch is the gallery's.
"""
