"""Galleries: indexes of backends and models. Reads them, finds entries, chooses the build or variant that suits a
machine.

`blobs` fetches builds, the worker installs them, the controller decides which node gets which. Start with
`backends/resolver.py` and `models/library.py`.
"""
