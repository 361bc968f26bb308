"""`local.json`: how a running fleet on this machine tells the commands of the same person where it is.

`corral up` writes it and takes it away; everybody else only reads. It holds no secret itself, only where they lie, yet
is 0600: the data folder's place is nobody else's business.
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


def config_folder(env: Mapping[str, str]) -> Path:
    if chosen := env.get("CORRAL_CONFIG_DIR"):
        return Path(chosen).expanduser()
    base = env.get("XDG_CONFIG_HOME") or str(Path(env.get("HOME") or "~").expanduser() / ".config")
    return Path(base) / "corral"


def local_file(env: Mapping[str, str]) -> Path:
    return config_folder(env) / "local.json"


def read_local(path: Path) -> LocalFleet | None:
    """None where no fleet runs here, or where the file cannot be used: then it is as if there were none."""
    try:
        fleet = decode(LocalFleet, path.read_bytes())
    except (OSError, Undecodable):
        return None
    return fleet if fleet.url else None


def write_local(path: Path, fleet: LocalFleet) -> None:
    make_private_folder(path.parent)
    write_atomically(path, encode(fleet) + b"\n", mode=0o600)


def forget_local(path: Path, *, pid: int) -> None:
    """Take the file away, unless another fleet of this person has written its own since."""
    fleet = read_local(path)
    if fleet is not None and fleet.pid == pid:
        path.unlink(missing_ok=True)
