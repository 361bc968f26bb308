"""`corral bundle`: backends and models for a fleet without internet access, in one file."""
