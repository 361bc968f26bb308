"""Content by digest: fetch with resume, verify, unpack safely, store. Controller and worker share this package.

Start with `contents.py`: it opens any `Source` and writes its content into a folder. The worker's installer decides
which version of a backend is current; the gallery decides which source to fetch.
"""
