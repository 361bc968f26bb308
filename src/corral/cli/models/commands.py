"""`corral models …`: lists, installs, edits and deletes models. `replicas.py` adds the commands for their replicas."""

from __future__ import annotations

import os
import shlex
import subprocess
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from corral.cli.common import declare
from corral.cli.common.fleet_command import destructive_command, fleet_command
from corral.cli.common.options import (
    NO_MATCH,
    NO_MATCH_IN_READABLE_GALLERIES,
    Detach,
    Json,
    MaxErrors,
    MaxSlowdown,
    MinRequests,
    Yes,
    confirm,
    note_unread_galleries,
    soak_fields,
)
from corral.cli.common.output import (
    DONE,
    is_interactive,
    key_value_lines,
    print_json,
    print_line,
    print_note,
    print_table,
    printable,
)
from corral.cli.models import files as model_files
from corral.cli.models import replicas as model_replicas
from corral.cli.models import text as model_text
from corral.cli.models.install import finish_change, install_models
from corral.cli.models.options import File, Recreate, Set, Soak, change_each, changes_of, read_text
from corral.kit.errors import CorralError, Failed, NotFound
from corral.kit.humanize import to_yaml

if TYPE_CHECKING:
    from corral.client import Client
    from corral.contract.catalogue import AvailableModel, EditModel, ModelChanged, ModelView

app = declare.App(
    help="""Install, edit, scale and delete the models of the fleet.

    \b
    Examples:
      corral models available qwen
      corral models install smollm2-135m
      corral models scale smollm2-135m --min 2
    """,
)
Model = Annotated[str, declare.Argument(metavar="MODEL", help="name of the model")]
Models = Annotated[list[str], declare.Argument(metavar="MODEL", help="names of models")]


@app.command("available")
@fleet_command
async def list_available(
    client: Client,
    term: Annotated[str, declare.Argument(metavar="TERM", help="only models that match these words")] = "",
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
    print_table(model_text.COLUMNS, [model_text.model_row(model) for model in models], empty=model_text.NO_MODELS)


@app.command("show")
@fleet_command
async def show_model(
    client: Client,
    name: Model,
    as_yaml: Annotated[bool, declare.Option("--yaml", help="print only the definition")] = False,
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


app.command("install")(install_models)


@app.command("edit")
@destructive_command
async def edit_model(
    client: Client,
    name: Model,
    sets: Set = None,
    unset: Annotated[
        list[str] | None,
        declare.Option("--unset", metavar="KEY", help="remove a key of the definition; can be repeated"),
    ] = None,
    file: File = "",
    recreate: Recreate = False,
    soak: Soak = "",
    max_errors: MaxErrors = "",
    max_slowdown: MaxSlowdown = None,
    min_requests: MinRequests = None,
    dry_run: Annotated[bool, declare.Option("--dry-run", help="with --soak: only show what would be done")] = False,
    detach: Detach = False,
    as_json: Json = False,
) -> int:
    """Change the definition of a model. Without --set, --unset and --file, opens your editor ($VISUAL or $EDITOR).

    The old replicas serve requests until a replica with the new definition is ready; --recreate stops them at once.
    Changes of descriptions, tags and limits do not replace replicas.

    With --soak a replica of the new revision starts beside the old ones and gets a growing share of the requests. If
    failures, time to first token or tokens/s are worse than those of the old revision, the model returns to it; exit
    code 1. `corral rollouts` shows the figures, pauses, promotes and aborts. Ctrl-C detaches; the trial goes on.

    \b
    Examples:
      corral models edit smollm2-135m --set context_size=8192 --set parameters.temperature=0.2
      corral models edit smollm2-135m --set backend=vllm --soak 5m --max-errors 1%
      corral models edit smollm2-135m --set backend=vllm --soak 5m --dry-run
      corral models edit smollm2-135m --unset parallel
      corral models edit smollm2-135m --file smollm2.yaml
      corral models edit smollm2-135m
    """
    from corral.contract.catalogue import EditModel

    if file and (sets or unset):
        raise declare.BadParameter("--file replaces the whole definition: remove --set and --unset")
    more = soak_fields(soak=soak, max_errors=max_errors, max_slowdown=max_slowdown, min_requests=min_requests)
    more["recreate"] = recreate
    if dry_run and not (soak and (sets or unset or file)):
        raise declare.BadParameter("--dry-run shows how --soak would try a change given by --set, --unset or --file")
    if sets or unset:
        edit = EditModel(changes=changes_of(sets, unset), **more)
        changed = await client.models.change(name, edit, plan=dry_run)
    elif file:
        changed = await client.models.replace(name, EditModel(text=read_text(file), **more), plan=dry_run)
    else:
        before = await client.models.get(name)
        text = _edit_in_editor(before)
        if text is None:
            print_note("Nothing was changed.")
            return DONE
        edit = EditModel(text=text, row_version=before.row_version, **more)
        changed = await _replace_or_save_draft(client, name, edit)
    return await finish_change(client, changed, detach=detach, as_json=as_json)


async def _replace_or_save_draft(client: Client, name: str, edit: EditModel) -> ModelChanged:
    """Save the edited text in a file when the controller refuses it, so that the work is not lost."""
    try:
        return await client.models.replace(name, edit)
    except CorralError as error:
        import tempfile

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
        bool, declare.Option("--force", help="delete even if other models are aliases of it, or a file defines it")
    ] = False,
    yes: Yes = False,
    as_json: Json = False,
) -> int:
    """Delete models and their schedules. Replicas finish their running requests first.

    Nodes remove the files a minute or two later, controllers after an hour. `corral models gc` frees the space at once.

    \b
    Examples:
      corral models delete smollm2-135m --yes
    """
    if not yes:
        confirm(f"delete {', '.join(names)}")

    delete = partial(client.models.delete, force=force)
    done, code = await change_each(dict.fromkeys(names), delete, as_json=as_json)
    if as_json:
        print_json(done)
    return code


def _edit_in_editor(model: ModelView) -> str | None:
    """The edited text, or None if it was not changed."""
    if not is_interactive():
        raise declare.BadParameter("cannot open an editor without a terminal: use --set, --unset or --file")
    editor = os.environ.get("VISUAL") or os.environ.get("EDITOR") or "vi"
    before = to_yaml(model.definition)
    import tempfile

    with tempfile.TemporaryDirectory(prefix="corral-") as folder:
        path = Path(folder) / "model.yaml"
        path.write_text(before, encoding="utf-8")
        code = subprocess.call([*shlex.split(editor), str(path)])
        if code != 0:
            raise Failed(f"{editor} exited with code {code}; nothing was changed")
        after = path.read_text(encoding="utf-8")
    return after if after.strip() and after != before else None


for _name, _command in {**model_replicas.COMMANDS, **model_files.COMMANDS}.items():
    app.command(_name)(_command)
