"""`corral models …`: what the fleet can be asked for. Its replicas are `model_replicas.py`'s, under the same word."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from corral.cli import model_replicas, model_text, watching
from corral.cli.asking import (
    NOTHING_FITS,
    NOTHING_FITS_IN_THE_REST,
    Detach,
    Json,
    Yes,
    confirm,
    remark_unread_galleries,
    said,
)
from corral.cli.output import DONE, FAILED, complain, interactive, pairs, plain, print_json, print_table, remark, tell
from corral.cli.remote import remote, remote_destructive, remote_destructive_with
from corral.kit.errors import CorralError, Failed, Invalid, NotFound

if TYPE_CHECKING:
    from corral.client import Client
    from corral.contract.catalogue import AvailableModel, EditModel, InstallModel, ModelChanged, ModelView

app = typer.Typer(
    rich_markup_mode=None,
    add_completion=False,
    no_args_is_help=True,
    help="Models: what the fleet can be asked for.",
)
Model = Annotated[str, typer.Argument(metavar="MODEL", help="its name", show_default=False)]
Models = Annotated[list[str], typer.Argument(metavar="MODEL...", help="names", show_default=False)]
MaybeModels = Annotated[
    list[str] | None,
    typer.Argument(metavar="[MODEL...]", help="names in a gallery, or gallery@name", show_default=False),
]
File = Annotated[str, typer.Option("--file", "-f", metavar="FILE", help="YAML with definitions; - reads stdin")]
Set = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="a key of the definition; may be repeated")
]
Recreate = Annotated[
    bool, typer.Option("--recreate", help="let the old replicas go at once, instead of when a new one is ready")
]


@app.command("available")
@remote
async def list_available(
    client: Client,
    term: Annotated[str, typer.Argument(metavar="[TERM]", help="only with these words in it", show_default=False)] = "",
    as_json: Json = False,
) -> None:
    """List the models the galleries have.

    \b
    Examples:
      corral models available
      corral models available "qwen coder"
    """
    entries = await client.models.available(term)
    unread = await remark_unread_galleries(client, "models")
    if as_json:
        print_json(entries)
        return
    rows = [model_text.available_row(entry) for entry in entries]
    print_table(model_text.AVAILABLE_COLUMNS, rows, empty=NOTHING_FITS_IN_THE_REST if unread else NOTHING_FITS)


@app.command("list")
@remote
async def list_models(client: Client, as_json: Json = False) -> None:
    """List the models of the fleet.

    \b
    Examples:
      corral models list
    """
    models = await client.models.list()
    if as_json:
        print_json(models)
        return
    empty = "no model yet: `corral models install NAME`, `corral models available` for names"
    print_table(model_text.COLUMNS, [model_text.model_row(model) for model in models], empty=empty)


@app.command("show")
@remote
async def show_model(
    client: Client,
    name: Model,
    as_yaml: Annotated[bool, typer.Option("--yaml", help="its definition and nothing else")] = False,
    as_json: Json = False,
) -> None:
    """Show one model with its definition: one of the fleet, or one that a gallery has and nobody installed yet.

    \b
    Examples:
      corral models show smollm2-135m
      corral models show localai@qwen3-4b
      corral models show smollm2-135m --yaml > mine.yaml
    """
    model = await _installed_or_available(client, name)
    if as_json:
        print_json(model)
        return
    if not as_yaml:
        for line in pairs(model_text.details(model)):
            tell(line)
        tell()
    for line in model_text.as_yaml(model.definition).splitlines():
        tell(plain(line))


async def _installed_or_available(client: Client, name: str) -> ModelView | AvailableModel:
    try:
        return await client.models.get(name)
    except NotFound as unknown:
        try:
            return await client.models.get_available(name)
        except NotFound:
            raise unknown from None


@app.command("install")
@remote_destructive_with("replace")
async def install_models(
    client: Client,
    names: MaybeModels = None,
    file: File = "",
    own_name: Annotated[str, typer.Option("--as", metavar="NAME", help="what to call it here", callback=said)] = "",
    variant: Annotated[
        str, typer.Option("--variant", metavar="NAME", help="this variant, not the one that suits the fleet")
    ] = "",
    sets: Set = None,
    replace: Annotated[bool, typer.Option("--replace", help="in place of the one of that name")] = False,
    recreate: Recreate = False,
    no_fetch: Annotated[
        bool, typer.Option("--no-fetch", help="fetch its files when the first request needs them, not now")
    ] = False,
    detach: Detach = False,
    as_json: Json = False,
) -> int:
    """Install models out of the galleries, or by definitions of your own, and fetch their files to the controller.

    Ctrl-C lets go of the fetching; it goes on. Exit code 0: done. 1: failing. 3: not finished yet.

    \b
    Examples:
      corral models install smollm2-135m
      corral models install smollm2-135m --detach
      corral models install smollm2-135m --as tiny --set context_size=2048
      corral models install --file mine.yaml --replace
    """
    from corral.contract.catalogue import InstallModel

    if bool(names) == bool(file):
        raise typer.BadParameter("give names of models, or --file")
    texts = _documents(file) if file else []
    if own_name and len(names or texts) != 1:
        raise typer.BadParameter("--as is for one model")
    more: dict[str, Any] = {"name": own_name, "overrides": _changes(sets, None), "replace": replace}
    more["fetch"] = not no_fetch
    asked = [InstallModel(model=name, variant=variant, recreate=recreate, **more) for name in names or ()]
    asked += [InstallModel(text=text, recreate=recreate, **more) for text in texts]
    return await _install(client, asked, detach=detach, as_json=as_json)


async def _install(client: Client, asked: Sequence[InstallModel], *, detach: bool, as_json: bool) -> int:
    """One that fails does not stop the rest."""
    done: list[ModelChanged] = []
    code = DONE
    for each in asked:
        try:
            done.append(await client.models.install(each))
        except CorralError as error:
            complain(error.message)
            code = FAILED
            continue
        if not as_json:
            _tell_changed(done[-1])
    fetching = [each.job_id for each in done if each.job_id]
    if as_json:  # with the operations' ids in it
        fetched = await watching.wait(client, fetching) if fetching and not detach else DONE
        print_json(done)
        return code or fetched
    fetched = await watching.stay(client, fetching, detach=detach, as_json=False) if fetching else DONE
    if any(each.changed for each in done):
        remark("It is loaded when somebody asks for it; `corral models scale` keeps replicas ready.")
    return code or fetched


@app.command("edit")
@remote_destructive
async def edit_model(
    client: Client,
    name: Model,
    sets: Set = None,
    unset: Annotated[
        list[str] | None, typer.Option("--unset", metavar="KEY", help="take this key away; may be repeated")
    ] = None,
    file: File = "",
    recreate: Recreate = False,
    as_json: Json = False,
) -> None:
    """Change a model's definition: some keys, the whole of it from a file, or in your editor.

    What is running serves on until a replica of the new definition is ready, unless --recreate says otherwise. Words
    for people (description, tags …) and limits replace nothing.

    \b
    Examples:
      corral models edit smollm2-135m --set context_size=8192 --set parameters.temperature=0.2
      corral models edit smollm2-135m --unset parallel
      corral models edit smollm2-135m --file smollm2.yaml
      corral models edit smollm2-135m
    """
    from corral.contract.catalogue import EditModel

    if file and (sets or unset):
        raise typer.BadParameter("--file brings the whole definition; --set and --unset change parts of it")
    if sets or unset:
        changed = await client.models.change(name, EditModel(changes=_changes(sets, unset), recreate=recreate))
    elif file:
        changed = await client.models.replace(name, EditModel(text=_read(file), recreate=recreate))
    else:
        before = await client.models.get(name)
        text = _in_editor(before)
        if text is None:
            remark("nothing was changed")
            return
        asked = EditModel(text=text, recreate=recreate, row_version=before.row_version)
        changed = await _replace_or_keep(client, name, asked)
    if as_json:
        print_json(changed)
    else:
        _tell_changed(changed)


async def _replace_or_keep(client: Client, name: str, asked: EditModel) -> ModelChanged:
    """What somebody typed is not lost because it cannot be meant."""
    try:
        return await client.models.replace(name, asked)
    except CorralError as error:
        with tempfile.NamedTemporaryFile("w", prefix="corral-", suffix=".yaml", delete=False) as kept:
            kept.write(asked.text)
        raise Failed(
            f"{error.message}\nwhat you wrote is in {kept.name}: `corral models edit {name} --file …`"
        ) from error


@app.command("delete")
@remote_destructive
async def delete_models(
    client: Client,
    names: Models,
    force: Annotated[
        bool, typer.Option("--force", help="though other models stand for it, or a file defines it")
    ] = False,
    yes: Yes = False,
    as_json: Json = False,
) -> int:
    """Delete models with their schedules; replicas finish what they are doing and go.

    \b
    Examples:
      corral models delete smollm2-135m --yes
    """
    if not yes:
        confirm(f"delete {', '.join(names)}")

    done: list[ModelChanged] = []
    code = DONE
    for name in dict.fromkeys(names):
        try:
            done.append(await client.models.delete(name, force=force))
        except CorralError as error:
            complain(error.message)
            code = FAILED
            continue
        if not as_json:
            _tell_changed(done[-1])
    if as_json:
        print_json(done)
    return code


def _changes(sets: Sequence[str] | None, unset: Sequence[str] | None) -> dict[str, Any]:
    try:
        return model_text.changes_of(sets or (), unset or ())
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def _read(file: str) -> str:
    try:
        text = sys.stdin.read() if file == "-" else Path(file).expanduser().read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise Invalid(f"{file} is not text") from error
    if not text.strip():
        raise Invalid(f"{'what came on stdin' if file == '-' else file} is empty")
    return text


def _documents(file: str) -> list[str]:
    try:
        return model_text.documents(_read(file))
    except ValueError as error:
        raise Invalid(f"{'what came on stdin' if file == '-' else file}: {error}") from error


def _in_editor(model: ModelView) -> str | None:
    """None when nothing was changed."""
    if not interactive():
        raise typer.BadParameter("nobody to edit here: use --set, --unset or --file")
    editor = os.environ.get("VISUAL") or os.environ.get("EDITOR") or "vi"
    before = model_text.as_yaml(model.definition)
    with tempfile.TemporaryDirectory(prefix="corral-") as folder:
        path = Path(folder) / "model.yaml"
        path.write_text(before, encoding="utf-8")
        code = subprocess.call([*shlex.split(editor), str(path)])
        if code != 0:
            raise Failed(f"{editor} ended with code {code}; nothing was changed")
        after = path.read_text(encoding="utf-8")
    return after if after.strip() and after != before else None


def _tell_changed(changed: ModelChanged) -> None:
    tell(plain(changed.message))
    for each in changed.notes:
        remark(f"note: {plain(each)}")
    if changed.pending_cleanup:
        remark("replicas of it as it was are still there; they go by themselves")


for _name, _command in model_replicas.COMMANDS.items():
    app.command(_name)(_command)
