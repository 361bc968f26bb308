"""A fleet as one file: read, compared with what is there, brought about, written out."""
