"""`corral secrets`: the secrets of a fleet whose roles run apart from each other, in one folder.

The folder has the files that `corral up` keeps in `secrets/` of its data folder.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

from corral.cli.common import declare
from corral.cli.common.data_folder import SecretsFolder
from corral.cli.common.options import Json
from corral.cli.common.output import print_json, print_line, print_note
from corral.cli.common.roles import make_bus_keys
from corral.cli.up.prepare import SERVER_LIFE, load_ca, make_certificates, make_key, read_or_empty
from corral.kit.certificates import Ca, expires_at, subject_names
from corral.kit.errors import Failed, Invalid, NotFound
from corral.kit.files import make_folder, write_atomically, write_secret

app = declare.App(
    help="""Create keys and certificates for a fleet whose roles run apart from each other.

    `corral up` needs none of this: it creates its secrets itself.

    \b
    Examples:
      corral secrets create ~/fleet --name fleet.example --name bus.example
      corral secrets certificate /run/tls --ca ~/fleet --name 10.0.0.7
    """,
)
_NAME = re.compile(r"(\*\.)?[A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?|[0-9A-Fa-f:.]{2,45}")

Names = Annotated[
    list[str],
    declare.Option("--name", metavar="HOST", help="host name or address that the certificate names; may be repeated"),
]
Folder = Annotated[str, declare.Argument(metavar="FOLDER", help="folder of the files; created if missing")]


@app.command("create")
def create_secrets(
    folder: Folder,
    names: Names,
    gateway_folder: Annotated[
        str | None,
        declare.Option(
            "--gateway-folder", metavar="FOLDER", help="also write what a gateway needs there, and nothing more"
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Create the secrets of a fleet in a folder.

    These are the keys of the bus, the first admin key, the key of the gateways, a CA and a certificate.

    Name every host under which others reach a gateway, a controller or the bus. Run the command again to add names or
    to renew the certificate: everything else stays. Controllers and the bus get the folder; gateways need
    gateway.key, ca.crt, server.crt and server.key only, and workers none of it.

    \b
    Examples:
      corral secrets create ~/fleet --name fleet.example --name bus.example --name 10.0.0.5
      corral secrets create /secrets --gateway-folder /gateway --name gateway-1 --name controller-1 --name bus
    """
    place, found = _folder(folder), SecretsFolder(_folder(folder))
    given = _check_names(names)
    with _explain_errors(place):
        hosts = {*given, *_names_so_far(found)}
        make_folder(place)
        make_bus_keys(found.bus_keys)
        make_key(found.admin_key)
        make_key(found.gateway_key)
        ca = make_certificates(found, tuple(sorted(hosts)), datetime.now(UTC))
    if gateway_folder:
        with _explain_errors(_folder(gateway_folder)):
            _copy_for_gateway(found, SecretsFolder(_folder(gateway_folder)))
    _report(found.server_cert, ca, as_json)
    if not as_json:
        print_note(f"Give gateways only gateway.key, ca.crt, server.crt and server.key of {place}.")


@app.command("certificate")
def issue_certificate(
    folder: Folder,
    names: Names,
    ca_folder: Annotated[
        str, declare.Option("--ca", metavar="FOLDER", help="folder of `corral secrets create`, with ca.crt and ca.key")
    ],
    as_json: Json = False,
) -> None:
    """Issue a certificate of the fleet's CA for a host.

    Writes server.crt and server.key, for a controller whose address is known only when it starts, as that of a pod.

    \b
    Examples:
      corral secrets certificate /run/tls --ca /secrets --name 10.0.0.7 --name corral-controller
    """
    target, hosts = SecretsFolder(_folder(folder)), _check_names(names)
    authority = SecretsFolder(_folder(ca_folder))
    if not authority.ca_cert.exists() or not authority.ca_key.exists():
        raise NotFound(f"{authority.path} has no ca.crt and ca.key: create them with `corral secrets create`")
    ca = load_ca(authority)
    with _explain_errors(target.path):
        make_folder(target.path)
        issued = ca.issue_server(hosts, datetime.now(UTC), life=SERVER_LIFE)
        write_secret(target.server_key, issued.key_pem)
        write_atomically(target.server_cert, issued.certificate_pem.encode(), mode=0o644)
    _report(target.server_cert, ca, as_json)


def _folder(given: str) -> Path:
    return Path(given).expanduser().absolute()


def _check_names(names: list[str]) -> tuple[str, ...]:
    bad = next((name for name in names if not _NAME.fullmatch(name)), None)
    if bad is not None:
        raise Invalid(f"--name {bad!r} is not a host name or an address: write fleet.example, *.example or 10.0.0.5")
    if not names:
        raise Invalid("--name is required: the host names and addresses under which others reach this fleet")
    return (*names, *(each for each in ("localhost", "127.0.0.1") if each not in names))


def _names_so_far(folder: SecretsFolder) -> frozenset[str]:
    try:
        return subject_names(read_or_empty(folder.server_cert))
    except ValueError:  # absent, or not a certificate
        return frozenset()


def _copy_for_gateway(whole: SecretsFolder, part: SecretsFolder) -> None:
    make_folder(part.path)
    for source, target in ((whole.gateway_key, part.gateway_key), (whole.server_key, part.server_key)):
        write_secret(target, source.read_text())
    for source, target in ((whole.ca_cert, part.ca_cert), (whole.server_cert, part.server_cert)):
        write_atomically(target, source.read_bytes(), mode=0o644)


def _report(certificate: Path, ca: Ca, as_json: bool) -> None:
    text = certificate.read_text()
    names, end = sorted(subject_names(text)), expires_at(text)
    if as_json:
        shown = {"folder": str(certificate.parent), "names": names, "expires_at": end.isoformat()}
        print_json({**shown, "ca": ca.fingerprint})
        return
    print_line(f"{certificate}: valid for {', '.join(names)} until {end:%Y-%m-%d}")
    print_line(f"CA: {ca.fingerprint}")


@contextlib.contextmanager
def _explain_errors(folder: Path) -> Iterator[None]:
    """Turn an error of the file system into one line that says what to do."""
    try:
        yield
    except OSError as error:
        raise Failed(
            f"{error.filename or folder}: {error.strerror or error}: choose a folder that user {os.getuid()} can write"
        ) from error
