"""Model files on this machine: `model_files.py` has them here when a replica starts, `sets.py` remembers which belong
together and when they were used last, so that those nobody uses can go."""
