"""One module per kind of source. Each opens it, and writes it into a folder; `contents.py` chooses among them."""
