"""A service: a role of Corral that the system starts, as whom, and with which files. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from corral.kit.errors import Invalid

ROLES = ("up", "worker", "controller", "gateway")
# Others run the roles that start backends: those run as root, because only root can give backends another user.
RUN_BACKENDS = frozenset({"up", "worker"})
USER = "corral"
BACKEND_USER = "corral-backend"
MARK = "Written by `corral service install`: change the settings, not this file"
_VARIABLE = re.compile(r"[A-Z][A-Z0-9_]*\Z")
_ENV_HEAD = "# Settings of the service: NAME=value, one per line. Restart the service after a change.\n"


@dataclass(frozen=True)
class Service:
    role: str
    program: Path  # the command `corral`
    data: Path
    home: Path
    config: Path  # where `corral up` writes the address of the fleet for other commands
    env_file: Path
    is_system: bool  # of the machine, started with it; else of one user
    settings: Mapping[str, str] = field(default_factory=dict)  # what the file of settings has
    address: str = ""  # ADDRESS:PORT that systemd holds for the service

    @property
    def name(self) -> str:
        return "corral" if self.role == "up" else f"corral-{self.role}"

    @property
    def user(self) -> str:
        """Empty: root, or the user of a service that is not of the system."""
        return USER if self.is_system and self.role not in RUN_BACKENDS else ""

    @property
    def new_users(self) -> tuple[str, ...]:
        """System users that must exist. A worker that is root uses `corral-backend` by itself where it exists."""
        if not self.is_system:
            return ()
        return (BACKEND_USER,) if self.role in RUN_BACKENDS else (USER,)

    @property
    def environment(self) -> dict[str, str]:
        found = {"CORRAL_DATA": str(self.data)} if self.role != "gateway" else {}
        if self.role in RUN_BACKENDS and self.is_system:
            found |= {
                "HOME": str(self.home),
                "XDG_CACHE_HOME": str(self.data / "cache"),
                "CORRAL_INSTALL_SYSTEM_PACKAGES": "false",  # the system is read-only to the service
            }
        if self.role == "controller" and self.is_system:
            found["CORRAL_SOCKET"] = "/run/corral/controller.sock"
        if self.role == "gateway" and self.is_system:
            found["CORRAL_CONTROLLER"] = "unix:/run/corral/controller.sock"
        return found


def parse_settings(text: str) -> dict[str, str]:
    """The variables of a file of settings, as systemd reads it."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        name, equals, value = line.strip().partition("=")
        if equals and not name.startswith(("#", ";")):
            found[name.strip()] = value.strip().strip("\"'")
    return found


def read_assignments(words: list[str], known: frozenset[str]) -> dict[str, str]:
    """`--set NAME=VALUE`. Raises Invalid."""
    found: dict[str, str] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or not _VARIABLE.match(name):
            raise Invalid(f"--set takes NAME=VALUE, such as CORRAL_LAN=true; this is {word!r}")
        if name.startswith("CORRAL_") and name not in known:
            raise Invalid(f"no setting {name} (see `docs/reference/settings.md`)")
        if not value.isprintable() or any(sign in value for sign in "\"'\\"):
            raise Invalid(f"--set {name}: quotes, backslashes and line breaks have no place in a value")
        found[name] = value
    return found


def settings_text(before: str, changes: Mapping[str, str]) -> str:
    """A file of settings with these values; its other lines stay as they are."""
    left = dict(changes)
    lines = (before or _ENV_HEAD).splitlines()
    for at, line in enumerate(lines):
        name = line.partition("=")[0].strip()
        if name in left:
            lines[at] = _assignment(name, left.pop(name))
    lines += [_assignment(name, value) for name, value in left.items()]
    return "\n".join(lines) + "\n"


def _assignment(name: str, value: str) -> str:
    return f'{name}="{value}"' if " " in value else f"{name}={value}"
