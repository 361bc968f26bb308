"""Trials of new revisions of models: each serves a share of the requests beside the old one, then stays or goes."""
