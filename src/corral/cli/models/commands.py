"""`corral models …`: lists, installs, edits and deletes models. `replicas.py` adds the commands for their replicas."""

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

from corral.cli.common.fleet_command import destructive_command, destructive_if_given, fleet_command
from corral.cli.common.options import (
    NO_MATCH,
    NO_MATCH_IN_READABLE_GALLERIES,
    Detach,
    Json,
    Yes,
    confirm,
    note_unread_galleries,
    reject_empty,
)
from corral.cli.common.output import (
    DONE,
    FAILED,
    is_interactive,
    key_value_lines,
    print_error,
    print_json,
    print_line,
    print_note,
    print_table,
    printable,
)
from corral.cli.models import replicas as model_replicas
from corral.cli.models import text as model_text
from corral.cli.operations import watch
from corral.kit.errors import CorralError, Failed, Invalid, NotFound
from corral.kit.humanize import to_yaml

if TYPE_CHECKING:
    from corral.client import Client
    from corral.contract.catalogue import AvailableModel, EditModel, InstallModel, ModelChanged, ModelView

app = typer.Typer(
    rich_markup_mode=None,
    add_completion=False,
    no_args_is_help=True,
    help="""Install, edit, scale and delete the models of the fleet.

    \b
    Examples:
      corral models available qwen
      corral models install smollm2-135m
      corral models scale smollm2-135m --min 2
    """,
)
Model = Annotated[str, typer.Argument(metavar="MODEL", help="name of the model", show_default=False)]
Models = Annotated[list[str], typer.Argument(metavar="MODEL", help="names of models", show_default=False)]
MaybeModels = Annotated[
    list[str] | None,
    typer.Argument(metavar="MODEL", help="names in a gallery, or GALLERY@NAME", show_default=False),
]
File = Annotated[str, typer.Option("--file", "-f", metavar="FILE", help="YAML file with definitions; - reads stdin")]
Set = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="set a key of the definition; can be repeated")
]
Recreate = Annotated[
    bool, typer.Option("--recreate", help="stop the old replicas at once instead of when a new one is ready")
]


@app.command("available")
@fleet_command
async def list_available(
    client: Client,
    term: Annotated[
        str, typer.Argument(metavar="TERM", help="only models that match these words", show_default=False)
    ] = "",
    as_json: Json = False,
) -> None:
    """List the models in the galleries.

    \b
    Examples:
      corral models available
      corral models available "qwen coder"
    """
    entries = await client.models.available(term)
    unread = await note_unread_galleries(client, "models")
    if as_json:
        print_json(entries)
        return
    rows = [model_text.available_row(entry) for entry in entries]
    print_table(model_text.AVAILABLE_COLUMNS, rows, empty=NO_MATCH_IN_READABLE_GALLERIES if unread else NO_MATCH)


@app.command("list")
@fleet_command
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
    empty = "No models yet. `corral models available` lists names; install one: `corral models install NAME`"
    print_table(model_text.COLUMNS, [model_text.model_row(model) for model in models], empty=empty)


@app.command("show")
@fleet_command
async def show_model(
    client: Client,
    name: Model,
    as_yaml: Annotated[bool, typer.Option("--yaml", help="print only the definition")] = False,
    as_json: Json = False,
) -> None:
    """Show one model with its definition.

    The model is an installed one, or an entry of a gallery.

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
        for line in key_value_lines(model_text.details(model)):
            print_line(line)
        print_line()
    for line in to_yaml(model.definition).splitlines():
        print_line(printable(line))


async def _installed_or_available(client: Client, name: str) -> ModelView | AvailableModel:
    try:
        return await client.models.get(name)
    except NotFound as unknown:
        try:
            return await client.models.get_available(name)
        except NotFound:
            raise unknown from None


@app.command("install")
@destructive_if_given("replace")
async def install_models(
    client: Client,
    names: MaybeModels = None,
    file: File = "",
    own_name: Annotated[
        str, typer.Option("--as", metavar="NAME", help="name of the model in this fleet", callback=reject_empty)
    ] = "",
    variant: Annotated[
        str,
        typer.Option(
            "--variant", metavar="NAME", help="install this variant instead of the one that fits the fleet best"
        ),
    ] = "",
    sets: Set = None,
    replace: Annotated[bool, typer.Option("--replace", help="replace an installed model of the same name")] = False,
    recreate: Recreate = False,
    no_fetch: Annotated[
        bool, typer.Option("--no-fetch", help="fetch the files on the first request instead of now")
    ] = False,
    detach: Detach = False,
    as_json: Json = False,
) -> int:
    """Install models and fetch their files to the controller. The definitions come from the galleries or from --file.

    Ctrl-C detaches; the controller continues to fetch. Exit code 0: done. 1: failed. 3: not finished yet.

    \b
    Examples:
      corral models install smollm2-135m
      corral models install smollm2-135m --detach
      corral models install smollm2-135m --as tiny --set context_size=2048
      corral models install --file mine.yaml --replace
    """
    from corral.contract.catalogue import InstallModel

    if bool(names) == bool(file):
        raise typer.BadParameter("give either names of models or --file")
    texts = _documents(file) if file else []
    if own_name and len(names or texts) != 1:
        raise typer.BadParameter("--as needs exactly one model")
    more: dict[str, Any] = {"name": own_name, "overrides": _changes(sets, None), "replace": replace}
    more["fetch"] = not no_fetch
    requests = [InstallModel(model=name, variant=variant, recreate=recreate, **more) for name in names or ()]
    requests += [InstallModel(text=text, recreate=recreate, **more) for text in texts]
    return await _install(client, requests, detach=detach, as_json=as_json)


async def _install(client: Client, requests: Sequence[InstallModel], *, detach: bool, as_json: bool) -> int:
    """Install one after the other. A failure does not stop the rest."""
    done: list[ModelChanged] = []
    code = DONE
    for each in requests:
        try:
            done.append(await client.models.install(each))
        except CorralError as error:
            print_error(error.message)
            code = FAILED
            continue
        if not as_json:
            _print_change(done[-1])
    fetching = [each.job_id for each in done if each.job_id]
    if as_json:  # the result has the ids of the operations
        fetched = await watch.wait_silently(client, fetching) if fetching and not detach else DONE
        print_json(done)
        return code or fetched
    fetched = await watch.follow_or_detach(client, fetching, detach=detach, as_json=False) if fetching else DONE
    if any(each.changed for each in done):
        print_note("The first request loads the model. Keep replicas ready: `corral models scale NAME --min 1`")
    return code or fetched


@app.command("edit")
@destructive_command
async def edit_model(
    client: Client,
    name: Model,
    sets: Set = None,
    unset: Annotated[
        list[str] | None, typer.Option("--unset", metavar="KEY", help="remove a key of the definition; can be repeated")
    ] = None,
    file: File = "",
    recreate: Recreate = False,
    as_json: Json = False,
) -> None:
    """Change the definition of a model. Without --set, --unset and --file, opens your editor ($VISUAL or $EDITOR).

    The old replicas serve requests until a replica with the new definition is ready; --recreate stops them at once.
    Changes of descriptions, tags and limits do not replace replicas.

    \b
    Examples:
      corral models edit smollm2-135m --set context_size=8192 --set parameters.temperature=0.2
      corral models edit smollm2-135m --unset parallel
      corral models edit smollm2-135m --file smollm2.yaml
      corral models edit smollm2-135m
    """
    from corral.contract.catalogue import EditModel

    if file and (sets or unset):
        raise typer.BadParameter("--file replaces the whole definition: remove --set and --unset")
    if sets or unset:
        changed = await client.models.change(name, EditModel(changes=_changes(sets, unset), recreate=recreate))
    elif file:
        changed = await client.models.replace(name, EditModel(text=_read(file), recreate=recreate))
    else:
        before = await client.models.get(name)
        text = _edit_in_editor(before)
        if text is None:
            print_note("Nothing was changed.")
            return
        edit = EditModel(text=text, recreate=recreate, row_version=before.row_version)
        changed = await _replace_or_save_draft(client, name, edit)
    if as_json:
        print_json(changed)
    else:
        _print_change(changed)


async def _replace_or_save_draft(client: Client, name: str, edit: EditModel) -> ModelChanged:
    """Save the edited text in a file when the controller refuses it, so that the work is not lost."""
    try:
        return await client.models.replace(name, edit)
    except CorralError as error:
        with tempfile.NamedTemporaryFile("w", prefix="corral-", suffix=".yaml", delete=False) as draft:
            draft.write(edit.text)
        raise Failed(
            f"{error.message}\nyour text is saved; correct it, then: `corral models edit {name} --file {draft.name}`"
        ) from error


@app.command("delete")
@destructive_command
async def delete_models(
    client: Client,
    names: Models,
    force: Annotated[
        bool, typer.Option("--force", help="delete even if other models are aliases of it, or a file defines it")
    ] = False,
    yes: Yes = False,
    as_json: Json = False,
) -> int:
    """Delete models and their schedules. Replicas finish their running requests first.

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
            print_error(error.message)
            code = FAILED
            continue
        if not as_json:
            _print_change(done[-1])
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
        raise Invalid(f"{file} is not a UTF-8 text file") from error
    if not text.strip():
        raise Invalid(f"{'stdin' if file == '-' else file} is empty")
    return text


def _documents(file: str) -> list[str]:
    try:
        return model_text.documents(_read(file))
    except ValueError as error:
        raise Invalid(f"{'stdin' if file == '-' else file}: {error}") from error


def _edit_in_editor(model: ModelView) -> str | None:
    """The edited text, or None if it was not changed."""
    if not is_interactive():
        raise typer.BadParameter("cannot open an editor without a terminal: use --set, --unset or --file")
    editor = os.environ.get("VISUAL") or os.environ.get("EDITOR") or "vi"
    before = to_yaml(model.definition)
    with tempfile.TemporaryDirectory(prefix="corral-") as folder:
        path = Path(folder) / "model.yaml"
        path.write_text(before, encoding="utf-8")
        code = subprocess.call([*shlex.split(editor), str(path)])
        if code != 0:
            raise Failed(f"{editor} exited with code {code}; nothing was changed")
        after = path.read_text(encoding="utf-8")
    return after if after.strip() and after != before else None


def _print_change(changed: ModelChanged) -> None:
    print_line(printable(changed.message))
    for each in changed.notes:
        print_note(f"Note: {printable(each)}")
    if changed.pending_cleanup:
        print_note("Replicas with the old definition still run; they stop by themselves.")


for _name, _command in model_replicas.COMMANDS.items():
    app.command(_name)(_command)
