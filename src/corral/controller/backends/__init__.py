"""Which backends should be installed where, and the loop that brings it about."""
