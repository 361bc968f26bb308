"""Certificates that the client trusts: the system's roots, a CA file, or a CA given by its fingerprint.

The fingerprint is what a join line carries (`sha256:` of the certificate's DER). The certificate itself is fetched
without verification, compared, and only then trusted; a man in the middle can hand us nothing that passes.
"""

from __future__ import annotations

import hmac
import ssl
from pathlib import Path

import aiohttp

from corral.kit.errors import Denied, Invalid, Unreachable

_PREFIX = "sha256:"
_MAX_PEM_BYTES = 64 * 1024


def check_fingerprint(text: str) -> str:
    """`sha256:` and 64 hex digits, in lower case, colons between the bytes allowed."""
    digits = text.removeprefix(_PREFIX).replace(":", "").lower()
    if not text.startswith(_PREFIX) or len(digits) != 64 or set(digits) - set("0123456789abcdef"):
        raise Invalid(f"{text!r} is not a fingerprint: expected sha256: and 64 hex digits, as the join line has it")
    return _PREFIX + digits


async def trust_of(url: str, ca: str, *, timeout_s: float, any_name: bool = False) -> ssl.SSLContext | None:
    """The TLS context; None for plain http. `any_name`: do not check the host name."""
    if not url.startswith("https://"):
        return None
    if not ca:
        return ssl.create_default_context()
    if ca.startswith(_PREFIX):
        context = _context_from(await fetch_ca(url, ca, timeout_s=timeout_s), source=ca)
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


async def fetch_ca(url: str, expected: str, *, timeout_s: float) -> str:
    """The PEM at `/ca.pem`, or `Denied` when it is not the one expected."""
    from corral.kit.certificates import fingerprint  # here: most commands never need it, and it takes 0.1 s to load

    wanted = check_fingerprint(expected)
    unverified = ssl.create_default_context()
    unverified.check_hostname = False
    unverified.verify_mode = ssl.CERT_NONE
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=timeout_s)) as session,
            session.get(f"{url}/ca.pem", ssl=unverified, allow_redirects=False) as answer,
        ):
            body = await answer.content.read(_MAX_PEM_BYTES)
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        raise Unreachable(f"no CA certificate at {url}/ca.pem: {error or 'no answer in time'}") from error
    if answer.status != 200:
        raise Unreachable(f"no CA certificate at {url}/ca.pem: HTTP {answer.status}; is this a fleet with TLS?")
    pem = body.decode("ascii", errors="replace")
    try:
        found = fingerprint(pem)
    except ValueError:
        found = ""
    if not hmac.compare_digest(found, wanted):
        raise Denied(
            f"the CA at {url} is not the one expected ({found or 'no certificate'}, not {wanted}): "
            "a wrong address, or somebody in between; take the join line again from `corral token create`"
        )
    return pem
