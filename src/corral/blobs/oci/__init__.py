"""Container images: `documents.py` reads what a registry says, `registry.py` asks it, `image_file.py` reads an image
from a tar file."""
