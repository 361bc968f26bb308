"""One module per kind of source. Each opens the source and writes it into a folder; `contents.py` selects the
module."""
