"""Models in galleries: what an entry says, the definition it comes to, which of its variants suits a fleet.

Leaves fetching the files to `blobs`, keeping definitions to the controller.
"""
