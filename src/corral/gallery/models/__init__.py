"""Models in galleries: their entries, the definition that an entry results in, the variant that suits a fleet.

`blobs` fetches the files, the controller stores definitions.
"""
