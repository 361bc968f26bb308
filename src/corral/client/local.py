"""The file by which a running fleet on this machine tells the commands of the same person where it is.

`corral up` writes one per fleet (`contexts.py`); earlier versions wrote a single `local.json`, which is still read. The
file holds no secret itself, only the paths of secrets, yet is 0600: the data folder's place is private.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from corral.contract.codec import Message, Undecodable, always, decode, encode
from corral.kit.files import make_private_folder, write_atomically


class LocalFleet(Message, frozen=True):
    url: str = always(str)  # as this machine reaches it
    public_url: str = ""  # as others do
    data: str = always(str)
    admin_key_file: str = always(str)
    ca_file: str = ""  # PEM; empty = no TLS
    bus_url: str = ""
    pid: int = 0  # of `corral up`
    started_at: float = 0.0  # seconds since 1970, of `corral up`


def config_folder(env: Mapping[str, str]) -> Path:
    if chosen := env.get("CORRAL_CONFIG_DIR"):
        return Path(chosen).expanduser()
    base = env.get("XDG_CONFIG_HOME") or str(Path(env.get("HOME") or "~").expanduser() / ".config")
    return Path(base) / "corral"


def local_file(env: Mapping[str, str]) -> Path:
    return config_folder(env) / "local.json"


def read_local(path: Path) -> LocalFleet | None:
    """None where there is no such file, or where it cannot be used: then it is as if there were none."""
    try:
        fleet = decode(LocalFleet, path.read_bytes())
    except (OSError, Undecodable):
        return None
    return fleet if fleet.url else None


def write_local(path: Path, fleet: LocalFleet) -> None:
    make_private_folder(path.parent)
    write_atomically(path, encode(fleet) + b"\n", mode=0o600)
