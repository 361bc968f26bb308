"""The command `corral`: one module per noun. Talks to a fleet through `client`; starts roles through `run.py` alone."""
