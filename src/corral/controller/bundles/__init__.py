"""Bundles: everything that a fleet without internet access needs, in one archive.

`library.py` keeps loaded bundles and answers in place of galleries, registries and indexes; `maker.py` plans a new one.
"""
