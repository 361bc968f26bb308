"""The order protocol with workers: send, accept, outcome, doubt, retry."""
