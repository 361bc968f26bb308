"""Model files on nodes, apart from any replica: staged before a load, listed, and removed when nothing needs them.

Start with `stages.py`. `calls.py` is the order protocol; `controller/files` has the files on the controller itself.
"""
