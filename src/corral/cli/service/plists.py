"""The property list of launchd for a service. Pure."""

from __future__ import annotations

import plistlib
from pathlib import Path
from typing import Any

from corral.cli.service.service import MARK, Service

_EXIT_S = {"up": 150, "worker": 120, "controller": 30, "gateway": 45}
_MAX_FILES = 65536


def label(service: Service) -> str:
    return f"org.corral.{service.role}"


def log_file(service: Service) -> Path:
    folder = Path("/Library/Logs") if service.is_system else service.home / "Library" / "Logs"
    return folder / "Corral" / f"{service.role}.log"


def property_list(service: Service) -> bytes:
    """launchd reads no file of settings: they are in the list, and `corral service install` puts changes into it."""
    log = str(log_file(service))
    found: dict[str, Any] = {
        "Label": label(service),
        "ProgramArguments": [str(service.program), service.role],
        "EnvironmentVariables": {**service.environment, **service.settings},
        "RunAtLoad": True,
        "KeepAlive": True,
        "ThrottleInterval": 10,
        "ExitTimeOut": _EXIT_S[service.role],
        "ProcessType": "Interactive",  # the default class slows the processes of a service down
        "SoftResourceLimits": {"NumberOfFiles": _MAX_FILES},
        "HardResourceLimits": {"NumberOfFiles": _MAX_FILES},
        "StandardOutPath": log,
        "StandardErrorPath": log,
    }
    text = plistlib.dumps(found, sort_keys=False).decode()
    head, newline, rest = text.partition("<plist ")
    return f"{head}<!-- {MARK} ({service.env_file}). -->\n{newline}{rest}".encode()
