"""`corral fleet release …`: the releases of the fleet, and the key that signs them, which may be kept elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from corral.cli.common import declare
from corral.cli.common.fleet_command import destructive_command, fleet_command
from corral.cli.common.options import Json, Yes, confirm
from corral.cli.common.output import print_json, print_line, print_note, print_table
from corral.cli.fleet.upgrade import read_signature, send_release
from corral.kit.errors import Failed, Invalid

if TYPE_CHECKING:
    from corral.client import Client
    from corral.kit.signing import Signer

COLUMNS = ("RELEASE", "VERSION", "SHA-256", "SIGNED", "BY")
KeyFile = Annotated[str, declare.Option("--key-file", metavar="FILE", help="the private key, of `release-keygen`")]
Out = Annotated[str, declare.Option("--out", metavar="FILE", help="where to write it")]


@fleet_command
async def list_releases(client: Client, as_json: Json = False) -> None:
    """List releases and the key that signs them.

    \b
    Examples:
      corral fleet releases
      corral fleet releases --json | jq .key.next_counter
    """
    found = await client.releases.list()
    if as_json:
        print_json(found)
        return
    rows = [
        (str(each.counter), each.version, each.sha256[:16], each.created_at, each.created_by) for each in found.releases
    ]
    print_table(COLUMNS, rows, empty="No releases: `corral fleet upgrade --wheel FILE` makes one.")
    where = "the controllers hold it" if found.key.is_held else "kept elsewhere"
    print_note(f"Release key: {found.key.public_key} ({where}); the next counter is {found.key.next_counter}")


@fleet_command
async def add_release(
    client: Client,
    wheel: Annotated[str, declare.Argument(metavar="WHEEL", help="the wheel of a version of Corral")],
    signature: Annotated[
        str, declare.Option("--signature", metavar="FILE", help="where the key is kept elsewhere")
    ] = "",
    as_json: Json = False,
) -> None:
    """Upload and sign a wheel, to be ordered later.

    \b
    Examples:
      corral fleet release-add corral-1.2.0-py3-none-any.whl
      corral fleet upgrade --to 1.2.0
    """
    await send_release(client, wheel, signature)
    newest = (await client.releases.list()).releases[0]
    if as_json:
        print_json(newest)
    else:
        print_line(f"Release {newest.counter} is Corral {newest.version}: `corral fleet upgrade --to {newest.version}`")


def make_key(out: Out = "release.key", as_json: Json = False) -> None:
    """Make a release key on this machine.

    It prints the public half. The machine may be one without a network. Let the fleet use it with `corral fleet
    release-trust`. From then on controllers cannot sign releases: whoever controls them cannot put other code on the
    workers in the name of Corral.

    \b
    Examples:
      corral fleet release-keygen --out release.key
    """
    from corral.kit.files import write_secret
    from corral.kit.signing import Signer

    path = Path(out).expanduser()
    if path.exists():
        raise Invalid(f"{path} exists: it may be a key in use; choose another file with --out")
    private = Signer.new_private_key()
    try:
        write_secret(path, private + "\n")
    except OSError as error:
        raise Failed(f"{path} cannot be written: {error.strerror}") from error
    public = Signer(private).public_key
    if as_json:
        print_json({"file": str(path), "public_key": public})
    else:
        print_line(public)
        print_note(f"The private key is in {path}. `corral fleet release-trust {public}` lets the fleet use it.")


def sign_release(
    wheel: Annotated[str, declare.Argument(metavar="WHEEL", help="the wheel of a version of Corral")],
    key_file: KeyFile = "release.key",
    counter: Annotated[
        int, declare.Option("--counter", metavar="N", min=1, help="higher than every earlier one of the fleet")
    ] = 0,
    out: Out = "",
) -> None:
    """Sign a wheel where the release key is.

    It needs no fleet and no network.

    `corral fleet releases` shows the lowest counter that is free. Workers refuse a lower one: a release that was
    replaced cannot be ordered again by somebody who has recorded it.

    \b
    Examples:
      corral fleet release-sign corral-1.2.0-py3-none-any.whl --counter 7
      corral fleet upgrade --wheel corral-1.2.0-py3-none-any.whl --signature corral-1.2.0.release
    """
    from corral.cli.common.roles import describe_wheel
    from corral.contract.codec import encode
    from corral.contract.releases import RELEASE_DOMAIN, ReleaseOrder

    if counter < 1:
        raise declare.BadParameter("--counter is required: `corral fleet releases` shows the lowest that is free")
    version, sha256, size = describe_wheel(Path(wheel).expanduser())
    order = ReleaseOrder(counter=counter, version=version, sha256=sha256, size_bytes=size)
    path = Path(out).expanduser() if out else Path(f"corral-{version}.release")
    _write(path, _signer(key_file).sign(encode(order), domain=RELEASE_DOMAIN))
    print_line(f"{path}: Corral {version}, counter {counter}, SHA-256 {sha256}")


def sign_key(
    public_key: Annotated[str, declare.Argument(metavar="KEY", help="public half of the new key")],
    key_file: KeyFile = "release.key",
    out: Out = "release-key.proof",
) -> None:
    """Sign a new release key with the present one.

    It is for a key that the controllers do not have.

    \b
    Examples:
      corral fleet release-sign-key NEW --key-file old.key --out new.proof
      corral fleet release-trust NEW --proof new.proof
    """
    from corral.contract.codec import encode
    from corral.contract.releases import KEY_DOMAIN, ReleaseKeyChange

    signer = _signer(key_file)
    change = ReleaseKeyChange(previous=signer.public_key, next=public_key)
    path = Path(out).expanduser()
    _write(path, signer.sign(encode(change), domain=KEY_DOMAIN))
    print_line(f"{path}: {signer.public_key} is followed by {public_key}")


@destructive_command
async def trust_key(
    client: Client,
    public_key: Annotated[
        str | None, declare.Argument(metavar="[KEY]", help="public half; without it the controllers make a key")
    ] = None,
    proof: Annotated[
        str, declare.Option("--proof", metavar="FILE", help="of `release-sign-key`, if the present key is elsewhere")
    ] = "",
    lost: Annotated[
        bool, declare.Option("--lost", help="the present key cannot sign any more: each worker needs --release-key")
    ] = False,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Let another key sign releases.

    The controllers forget the private key that they had. Workers follow at their next registration or renewal of
    credentials, because the present key signs the new one.

    \b
    Examples:
      corral fleet release-trust KEY
      corral fleet release-trust KEY --proof new.proof
      corral fleet release-trust                  (a new key, which the controllers keep)
      corral fleet release-trust --lost           (the same, after the present one was lost)
    """
    signed = read_signature(proof) if proof else ""
    if not yes:
        confirm("let " + ("another key" if public_key else "a new key of the controllers") + " sign releases")
    found = await client.releases.change_key(public_key or "", proof=signed, is_lost=lost)
    if as_json:
        print_json(found)
        return
    print_line(f"Releases are signed by {found.key.public_key} from now on.")
    if lost:
        print_note(f"Start each worker once with --release-key {found.key.public_key}: it does not follow by itself.")


def _signer(key_file: str) -> Signer:
    from corral.kit.signing import Signer

    try:
        return Signer(Path(key_file).expanduser().read_text(encoding="ascii").strip())
    except (OSError, ValueError) as error:
        raise Invalid(f"{key_file} is no release key: `corral fleet release-keygen` makes one") from error


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text + "\n", encoding="ascii")
    except OSError as error:
        raise Failed(f"{path} cannot be written: {error.strerror}") from error


COMMANDS: dict[str, Callable[..., Any]] = {
    "releases": list_releases,
    "release-add": add_release,
    "release-keygen": make_key,
    "release-sign": sign_release,
    "release-sign-key": sign_key,
    "release-trust": trust_key,
}
