"""What should be true on every node, and what each still has to do for it."""
