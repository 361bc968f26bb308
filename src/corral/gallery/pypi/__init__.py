"""`pypi://` sources: a package and all it needs, as a list of wheels with hashes, chosen for one kind of machine."""
