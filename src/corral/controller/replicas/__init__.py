"""Replicas: what should serve a model does, where the scheduler says, and what should not any more ends."""
