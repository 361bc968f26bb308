"""Makes unpacked files runnable: finds the program, and moves files up from a single top folder. Blocking."""

from __future__ import annotations

import os
from pathlib import Path

from corral.blobs.errors import BadArchive, UnsafeArchive
from corral.contract.manifest import LOCALAI, Manifest
from corral.worker.installer.records import RUN_FILE


def make_runnable(folder: Path, manifest: Manifest | None) -> None:
    """Raises BadArchive where there is nothing to start. `manifest` None: LocalAI's way, by `run.sh`."""
    word = (manifest or LOCALAI).command[0] if (manifest or LOCALAI).command else RUN_FILE
    if word.removeprefix("./") == RUN_FILE:
        _find_run_file(folder)
    elif "/" in word and "{" not in word and not word.startswith("/"):
        program = folder / word
        if not program.is_file():
            raise BadArchive(f"its command starts with {word!r}, which it does not contain")
        _make_executable(program, folder)


def _find_run_file(folder: Path) -> None:
    run_file = folder / RUN_FILE
    if not run_file.is_file():
        _lift(folder)
    if not run_file.is_file():
        raise BadArchive(f"it has no {RUN_FILE}, and its manifest names no other command")
    _make_executable(run_file, folder)


def _make_executable(program: Path, folder: Path) -> None:
    """Archives may lose the bits."""
    if not program.resolve().is_relative_to(folder.resolve()):
        raise UnsafeArchive(f"{program.name} is a link to something outside")
    if not program.stat().st_mode & 0o100:
        program.chmod(0o755)


def _lift(folder: Path) -> None:
    """An archive with one folder around everything, as people pack them: that folder's content is the backend."""
    tops = list(folder.iterdir())
    if len(tops) != 1 or tops[0].is_symlink() or not (tops[0] / RUN_FILE).is_file():
        return
    aside = folder / ".lifting"  # the folder may contain something of its own name
    tops[0].rename(aside)
    for path in list(aside.iterdir()):
        path.rename(folder / path.name)
    aside.rmdir()
    _check_links(folder)


def _check_links(folder: Path) -> None:
    """One level up, a link that stayed inside by way of the old folder's name may not any more."""
    root = os.path.realpath(folder)
    for path, folders, files in os.walk(root):
        for name in (*folders, *files):
            full = os.path.join(path, name)
            if os.path.islink(full) and not f"{os.path.realpath(full)}/".startswith(f"{root}/"):
                raise UnsafeArchive(f"{os.path.relpath(full, root)!r} is a link to something outside")
