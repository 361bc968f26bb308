"""`pypi://` sources: a package and its dependencies as a list of wheels with hashes, for one kind of machine."""
