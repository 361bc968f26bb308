"""Removing a model's staged files (docs/reference/wire/models.md#delete). Blocking."""

from __future__ import annotations

import shutil
from pathlib import Path

from corral.kit.errors import Failed, Invalid


def remove_model(models: Path, name: str) -> None:
    """A folder of that name with all that is in it; else the file of that name, and those beside it that begin with
    it and a dot. Nothing there is fine. Raises Invalid for a name that leads elsewhere, Failed if the disk refuses."""
    root = models.resolve()
    if not name.strip() or "\0" in name:
        raise Invalid("a model's name is needed")
    path = root / name
    # The parent is what must be inside: a link of that name is itself removed, never what it points to.
    if path.name in ("", ".", "..") or ".." in Path(name).parts or path == root:
        raise Invalid(f"{name[:200]!r} leads out of the models folder")
    if not path.parent.resolve().is_relative_to(root):
        raise Invalid(f"{name[:200]!r} leads out of the models folder")
    try:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
            return
        path.unlink(missing_ok=True)
        if path.parent.is_dir():
            for beside in [each for each in path.parent.iterdir() if each.name.startswith(f"{path.name}.")]:
                if not beside.is_dir() or beside.is_symlink():
                    beside.unlink(missing_ok=True)
    except OSError as error:
        raise Failed(f"cannot remove {name}: {error.strerror}") from error
