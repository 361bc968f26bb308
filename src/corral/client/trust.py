"""Which CA the client trusts over https: the system's roots, a CA file, or a pinned CA (`kit/ca_pin.py`)."""

from __future__ import annotations

import ssl
from pathlib import Path

from corral.kit.ca_pin import fetch_pinned_ca, is_pin
from corral.kit.errors import Invalid, NotFound, Unreachable


async def trust_of(url: str, ca: str, *, timeout_s: float, any_name: bool = False) -> ssl.SSLContext | None:
    """The TLS context; None for plain http. `any_name`: do not check the host name."""
    if not url.startswith("https://"):
        return None
    if not ca:
        return ssl.create_default_context()
    if is_pin(ca):
        context = _context_from(await _fetch_pinned(url, ca, timeout_s=timeout_s), source=ca)
    else:
        context = _context_from_file(Path(ca))
    context.check_hostname = not any_name
    return context


def _context_from_file(file: Path) -> ssl.SSLContext:
    path = file.expanduser()
    try:
        return _context_from(path.read_text(), source=str(path))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not text"
        raise Invalid(f"the CA in {path} cannot be read ({reason}): give another with --ca or CORRAL_CA") from error


def _context_from(pem: str, *, source: str) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cadata=pem)
    except ssl.SSLError as error:
        raise Invalid(f"{source} is not a CA certificate in PEM form") from error


async def _fetch_pinned(url: str, pin: str, *, timeout_s: float) -> str:
    try:
        return await fetch_pinned_ca(url, pin, timeout_s=timeout_s)
    except ValueError as error:
        raise Invalid(str(error)) from error
    except NotFound as error:
        raise Unreachable(error.message) from error
