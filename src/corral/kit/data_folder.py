"""Where a process keeps its data unless somebody says otherwise: below the person's home, for root in /var/lib/corral.

Root's home is closed to everybody else, and backends run as another user where the worker is root (ADR 0019): they
could not reach their own files there.
"""

from __future__ import annotations

import os
import pwd
from pathlib import Path

HOME_DATA = Path("~/.local/share/corral")  # with the tilde: what somebody gives has none
ROOT_DATA = Path("/var/lib/corral")


def resolve_data(data: Path) -> Path:
    """The folder as an absolute path. Root's default is below `ROOT_DATA`, but not where the one below its home is in
    use already, where somebody set HOME, or where `ROOT_DATA` belongs to another user (the service's)."""
    at_home = data.expanduser().absolute()
    is_default = data == HOME_DATA or HOME_DATA in data.parents
    if not is_default or os.geteuid() != 0 or at_home.exists() or _is_home_chosen() or not _is_free_for_root(ROOT_DATA):
        return at_home
    return ROOT_DATA / data.relative_to(HOME_DATA)


def _is_home_chosen() -> bool:
    return Path.home() != Path(pwd.getpwuid(0).pw_dir)


def _is_free_for_root(folder: Path) -> bool:
    try:
        return folder.stat().st_uid == 0
    except FileNotFoundError:
        return True
