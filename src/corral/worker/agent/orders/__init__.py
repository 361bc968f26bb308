"""Orders of the controller. `subscriptions.py` lists the subjects; `backends.py` and `replicas.py` have the
handlers."""
