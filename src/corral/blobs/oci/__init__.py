"""Container images: `registry.py` queries registries, `documents.py` parses indexes and manifests, `image_file.py`
reads an image from a tar file."""
