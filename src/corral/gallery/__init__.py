"""The index of backends: which there are, which build of one suits a node, and where exactly that build lives.

Leaves fetching builds to `blobs`, installing to the worker, deciding who gets what to the controller.
"""
