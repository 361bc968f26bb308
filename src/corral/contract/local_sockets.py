"""The unix socket through which a gateway reaches the ingress of a worker on its own machine: its path, which both
compute (docs/adr/0024-a-unix-socket-on-one-machine.md).

The name has the node's id and the port of its ingress. A port has one owner on a machine, so the socket leads to the
same worker as the address in the view, also after `corral nodes replace`.
"""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

MAX_PATH_BYTES = 100  # the kernel allows 108 on Linux and 104 elsewhere
LONGEST_NAME = f"{'0' * 36}-{'0' * 5}.sock"
_NODE_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9-]{0,35}")  # a foreign controller may send anything; this names a file


def local_socket(folder: Path, node_id: str, port: int) -> str:
    """Empty: the id cannot name a file, or there is no port."""
    return str(folder.absolute() / f"{node_id}-{port}.sock") if _NODE_ID.fullmatch(node_id) and port else ""


def check_socket_folder(folder: Path) -> str | None:
    """What is wrong with a folder of sockets; None: nothing, or it does not exist. The gateway sends tokens to these
    sockets, so no other user may create one."""
    if len(os.fsencode(folder.absolute() / LONGEST_NAME)) > MAX_PATH_BYTES:
        longest = MAX_PATH_BYTES - len(LONGEST_NAME) - 1
        return f"{str(folder)!r} is too long for sockets; give a folder with a path of at most {longest} bytes"
    try:
        found = folder.stat()
    except FileNotFoundError:
        return None
    except OSError as error:
        return f"{str(folder)!r} cannot be used: {error.strerror}"
    if not stat.S_ISDIR(found.st_mode):
        return f"{str(folder)!r} is not a folder"
    if found.st_uid != os.geteuid():
        return f"{str(folder)!r} belongs to another user; give a folder of your own"
    if found.st_mode & 0o077:
        return f"other users can open {str(folder)!r}; close it with `chmod 700`, or give another folder"
    return None
