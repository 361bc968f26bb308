"""Everything that exists only for LocalAI workers: the controller acts as their agent and their ingress."""
