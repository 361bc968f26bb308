"""The versions of Corral on this machine: `<data>/corral/versions/<digest>`, the link `current` to the one in use, and
`.complete` as the last file of each. The installer of the join line makes the same (docs/adr/0028).
"""

from __future__ import annotations

import contextlib
import os
import sys
from dataclasses import dataclass
from pathlib import Path

VERSIONS, CURRENT, COMPLETE = "versions", "current", ".complete"
_CONTAINER_MARKS = (Path("/.dockerenv"), Path("/run/.containerenv"))


@dataclass(frozen=True)
class Versions:
    """The folder that holds them."""

    root: Path

    def folder(self, digest: str) -> Path:
        """Of the wheel with this SHA-256."""
        return self.root / VERSIONS / digest[:16]

    @property
    def current(self) -> Path:
        """Where the link leads."""
        return (self.root / CURRENT).resolve()

    @property
    def command(self) -> str:
        """Starts whatever is current when it runs."""
        return str(self.root / CURRENT / "bin" / "corral")

    def make_current(self, folder: Path) -> None:
        """Atomic: there is a current version at every moment."""
        link = self.root / f"{CURRENT}.new"
        with contextlib.suppress(FileNotFoundError):
            link.unlink()
        link.symlink_to(folder)
        os.replace(link, self.root / CURRENT)


def is_complete(folder: Path) -> bool:
    return (folder / COMPLETE).exists()


def find_versions(prefix: Path) -> Versions | None:
    """The folder of versions that the Corral below `prefix` belongs to; None: it was not installed by a join line."""
    folder = prefix.resolve()
    root = folder.parent.parent
    is_one = folder.parent.name == VERSIONS and is_complete(folder) and (root / CURRENT).is_symlink()
    return Versions(root) if is_one else None


def why_not(prefix: Path) -> str:
    """Why the Corral below `prefix` cannot replace itself; empty: it can."""
    if find_versions(prefix) is not None:
        return ""
    if (prefix.parent / "pyproject.toml").is_file():
        return "it runs from a checkout: update the checkout, then `corral worker reload`"
    if any(mark.exists() for mark in _CONTAINER_MARKS) or "KUBERNETES_SERVICE_HOST" in os.environ:
        return "it runs in a container: replace the container by one of the new image"
    return (
        "it was not installed by a join line: install the new version the way this one was installed, "
        "then `corral worker reload`"
    )


def reload_command() -> list[str]:
    """What a reload starts: the current version where there are several, else the same program again."""
    versions = find_versions(Path(sys.prefix))
    return [versions.command, *sys.argv[1:]] if versions is not None else [sys.executable, *sys.orig_argv[1:]]
