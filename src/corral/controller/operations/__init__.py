"""Long work that people watch: what was asked, how far each node is, and how it ends."""
