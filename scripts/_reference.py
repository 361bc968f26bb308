"""Writes docs/reference/settings.md from the settings' own declarations; a test holds the page to the code.

.venv/bin/python scripts/_reference.py
"""

from __future__ import annotations

from pathlib import Path

from corral.cli.nodes.bus_server import BusRoleSettings
from corral.cli.up.settings import UpSettings
from corral.controller.settings import ControllerSettings
from corral.gateway.settings import GatewaySettings
from corral.kit.settings import describe
from corral.worker.settings import WorkerSettings

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "settings.md"
ROLES = {
    "up": UpSettings,
    "controller": ControllerSettings,
    "gateway": GatewaySettings,
    "worker": WorkerSettings,
    "bus": BusRoleSettings,
}
HEAD = """# Settings

Every setting can be given as a flag, as an environment variable, or in the TOML file named by `--config`; flags win
over the environment, the environment over the file. Spans of time are written `10s`, `15m`, `1h30m`, `250ms`, or as
bare seconds. A value that cannot be used stops the start, and all such faults are told at once. Secrets are never
shown in a log.

`corral up` has few of its own and hands the variables of the others on to them:
`CORRAL_EXPOSE_NODE_HEADER=true corral up`.

This page is written by `scripts/_reference.py`.
"""


def render() -> str:
    parts = [HEAD]
    for role, kind in ROLES.items():
        parts.append(f"\n## corral {role}\n\n| flag | variable | kind | default | meaning |\n|---|---|---|---|---|\n")
        for doc in describe(kind):
            names = "<br>".join(f"`{name}`" for name in (doc.env, *doc.aliases))
            default = "**required**" if doc.default == "required" else f"`{doc.default}`" if doc.default else ""
            if doc.secret:
                default = "secret"
            meaning = doc.help.replace("|", "\\|")
            parts.append(f"| `{doc.flag}` | {names} | {doc.kind} | {default} | {meaning} |\n")
    return "".join(parts)


if __name__ == "__main__":
    PAGE.write_text(render())
