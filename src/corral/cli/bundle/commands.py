"""`corral bundle …`: create, show, load, list and remove bundles."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from corral.cli.common import declare
from corral.cli.common.fleet_command import destructive_command, fleet_command
from corral.cli.common.options import Json, Yes, confirm
from corral.cli.common.output import DONE, key_value_lines, print_json, print_line, print_note, print_table, printable
from corral.kit.errors import Invalid
from corral.kit.humanize import format_bytes

if TYPE_CHECKING:
    from corral.client import Client
    from corral.contract.bundles import BundleMachine, BundleView

app = declare.App(
    help="""Take backends and models to a fleet without internet access, in one file.

    \b
    Examples:
      corral bundle create farm.bundle        # on a fleet with internet access
      corral bundle show farm.bundle
      corral bundle load farm.bundle          # on the other fleet
    """,
)
File = Annotated[str, declare.Argument(metavar="FILE", help="the bundle: a file of this machine")]
BACKEND_COLUMNS = ("BACKEND", "BUILD", "VERSION", "MACHINE", "SIZE")
MODEL_COLUMNS = ("MODEL", "FILES", "SIZE")
LIST_COLUMNS = ("DIGEST", "LOADED", "SIZE", "BACKENDS", "MODELS")
_SHORT_DIGEST = 12


@app.command("create")
@fleet_command
async def create_bundle(
    client: Client,
    file: File,
    backends: Annotated[
        list[str] | None, declare.Option("--backend", metavar="NAME", help="only this backend; may be repeated")
    ] = None,
    models: Annotated[
        list[str] | None,
        declare.Option("--model", metavar="NAME", help="only this model and its backend; may be repeated"),
    ] = None,
    machines: Annotated[
        list[str] | None,
        declare.Option(
            "--machine",
            metavar="PLATFORM[,CAPABILITY[,PYTHON]]",
            help="for such machines instead of those of this fleet: linux/arm64,nvidia-l4t,3.12; may be repeated",
        ),
    ] = None,
    no_corral: Annotated[
        bool, declare.Option("--no-corral", help="leave out Corral's own packages, with which machines join")
    ] = False,
    force: Annotated[bool, declare.Option("--force", help="overwrite the file")] = False,
    as_json: Json = False,
) -> int:
    """Write backends and models into one file, for another fleet.

    The bundle has exactly the builds and wheels that the machines of this fleet need, and the files of its models.
    The controller fetches what it lacks. Without --backend and --model, everything that the fleet has is included.

    \b
    Examples:
      corral bundle create farm.bundle
      corral bundle create farm.bundle --model smollm2-135m
      corral bundle create jetson.bundle --backend llama-cpp --machine linux/arm64,nvidia-l4t,3.12
    """
    from corral.cli.bundle.create import BundleDownload, print_notes
    from corral.contract.bundles import PlanBundle, read_manifest, view_of

    path = _new_file(file, force=force)
    request = PlanBundle(
        tuple(backends) if backends else None,
        tuple(models) if models else None,
        tuple(map(_machine, machines)) if machines else None,
        packages=not no_corral,
    )
    download = BundleDownload(client, request, quiet=as_json)
    plan = await download.wait_until_ready()
    if isinstance(plan, int):
        return plan
    await download.write(plan, path)
    view = view_of(read_manifest(plan.document.encode()), plan.digest)
    if as_json:
        print_json(view)
        return DONE
    print_notes(plan)
    _print_contents(view)
    print_note(f"On the other fleet: `corral bundle load {path.name}`")
    return DONE


@app.command("show")
def show_bundle(
    file: File,
    check: Annotated[bool, declare.Option("--verify", help="check the hash of every member")] = False,
    as_json: Json = False,
) -> int:
    """Print the contents of a bundle and its digest.

    Needs no fleet. The digest covers the manifest, which names the digest of every member.

    \b
    Examples:
      corral bundle show farm.bundle
      corral bundle show farm.bundle --verify
    """
    import asyncio

    from corral.cli.bundle.archive import open_archive, verify
    from corral.cli.common.output import transfer_bar
    from corral.contract.bundles import view_of
    from corral.kit.threads import run_in_thread

    archive = open_archive(_path(file))
    if check:
        with transfer_bar(f"checking {archive.path.name}", archive.manifest.size_bytes) as on_bytes:
            asyncio.run(run_in_thread(lambda stop: verify(archive, on_bytes, stop)))
    view = view_of(archive.manifest, archive.digest)
    if as_json:
        print_json(view)
    else:
        _print_contents(view)
        if check:
            print_note(f"All {len(archive.manifest.blobs)} members have the right hash.")
    return DONE


@app.command("load")
@fleet_command
async def load_bundle(client: Client, file: File, as_json: Json = False) -> None:
    """Give a bundle to the controller, which then serves from it.

    The whole bundle is checked first: of a damaged one nothing is sent. The upload is an operation; a second run
    continues it. Compare the printed digest with that of `corral bundle create`.

    \b
    Examples:
      corral bundle load farm.bundle
    """
    from corral.cli.bundle.archive import open_archive
    from corral.cli.bundle.load import load_archive

    view = await load_archive(client, open_archive(_path(file)))
    if as_json:
        print_json(view)
        return
    _print_contents(view)
    if view.models:
        print_note(f"Install a model from it: `corral models install {view.models[0].name}`")
    elif view.backends:
        print_note(f"Install a backend from it: `corral backends install {view.backends[0].name}`")


@app.command("list")
@fleet_command
async def list_bundles(client: Client, as_json: Json = False) -> None:
    """List the loaded bundles.

    Of two with the same backend or model, the first is used.

    \b
    Examples:
      corral bundle list
    """
    bundles = await client.bundles.list()
    if as_json:
        print_json(bundles)
        return
    rows = [
        (
            view.digest.removeprefix("sha256:")[:_SHORT_DIGEST],
            view.loaded_at,
            format_bytes(view.size_bytes),
            ", ".join(dict.fromkeys(each.name for each in view.backends)),
            ", ".join(each.name for each in view.models),
        )
        for view in bundles
    ]
    print_table(LIST_COLUMNS, rows, empty="No bundle is loaded: `corral bundle load FILE`.")


@app.command("rm")
@destructive_command
async def remove_bundle(
    client: Client,
    digest: Annotated[
        str, declare.Argument(metavar="DIGEST", help="of the bundle, from `corral bundle list`; may be shortened")
    ],
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Remove a loaded bundle from the controller.

    Backends that are installed and models that were fetched stay. What only the bundle has cannot be installed again.

    \b
    Examples:
      corral bundle rm 3f9a2c
    """
    if not yes:
        confirm(f"remove the bundle {digest}")
    view = await client.bundles.remove(digest)
    if as_json:
        print_json(view)
        return
    print_line(f"Removed {view.digest}: {format_bytes(view.size_bytes)}")


def _path(file: str) -> Path:
    return Path(file).expanduser()


def _new_file(file: str, *, force: bool) -> Path:
    path = _path(file)
    if path.exists() and not force:
        raise Invalid(f"{path} exists already: choose another name, or add --force")
    if not path.parent.is_dir():
        raise Invalid(f"there is no folder {path.parent}")
    return path


def _machine(text: str) -> BundleMachine:
    from corral.contract.bundles import BundleMachine

    parts = [part.strip() for part in text.split(",")]
    if not 1 <= len(parts) <= 3 or "/" not in parts[0]:
        raise declare.BadParameter(f"--machine {text!r}: write PLATFORM[,CAPABILITY[,PYTHON]], like linux/amd64")
    return BundleMachine(*parts)


def _print_contents(view: BundleView) -> None:
    if view.backends:
        rows = [
            (each.name, each.variant, each.version, each.machine, format_bytes(each.size_bytes))
            for each in view.backends
        ]
        print_table(BACKEND_COLUMNS, rows, empty="")
        print_line()
    if view.models:
        files = [(each.name, str(each.files), format_bytes(each.size_bytes)) for each in view.models]
        print_table(MODEL_COLUMNS, files, empty="")
        print_line()
    facts = [
        ("Corral", "; ".join(view.packages) or "not included"),
        ("Made by", f"Corral {view.corral}"),
        ("Size", format_bytes(view.size_bytes)),
        ("Digest", view.digest),
    ]
    for line in key_value_lines(facts):
        print_line(printable(line))
