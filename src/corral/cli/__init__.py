"""The command `corral`: one sub-package per group of commands, `common` for what they share.

Commands reach a fleet through `corral.client`. Only `common/roles.py` imports the other packages (roles, bus, store).
"""
