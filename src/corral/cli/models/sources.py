"""Models from anywhere: what a source or a file of this machine would become, and the request that installs it."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from corral.cli.common.output import print_json, print_line, print_note, printable
from corral.cli.models.upload import (
    describe_files,
    find_parts,
    is_local_path,
    local_path,
    read_local_header,
    upload_files,
)
from corral.contract.installs import InstallPlan, LocalFile, PlanModel
from corral.kit.errors import Invalid
from corral.kit.humanize import to_yaml

if TYPE_CHECKING:
    from corral.client import Client
    from corral.contract.catalogue import InstallModel


_MAX_COMMAND = 500


@dataclass(frozen=True)
class SourceOptions:
    quant: str = ""
    name: str = ""
    projector: str = ""
    overrides: Mapping[str, Any] = field(default_factory=dict)
    quiet: bool = False  # nothing but the result is printed


@dataclass(frozen=True)
class PlannedInstall:
    plan: InstallPlan
    uploads: tuple[tuple[Path, LocalFile], ...] = ()  # before the install


def is_source(text: str) -> bool:
    """Whether it names a place or a file, not a model of a gallery."""
    return "://" in text or text.startswith("hf.co/") or is_local_path(text)


def check_source_options(names: Sequence[str], options: SourceOptions) -> None:
    """Raises Invalid for options that say nothing about these models."""
    galleries = [name for name in names if not is_source(name)]
    if galleries and (options.quant or options.projector):
        option = "--quant" if options.quant else "--mmproj"
        raise Invalid(f"{option} is for hf:// and GGUF files; of {galleries[0]}, --variant chooses a variant")
    if options.projector and len(names) != 1:
        raise Invalid("--mmproj needs exactly one model")


async def plan_source(client: Client, text: str, options: SourceOptions) -> PlannedInstall:
    """Nothing is uploaded and nothing is installed. Raises a CorralError."""
    wanted: dict[str, Any] = {"quant": options.quant, "name": options.name, "overrides": dict(options.overrides)}
    if not is_local_path(text):
        if options.projector:
            raise Invalid("--mmproj is for files of this machine: a repository's projector is found by itself")
        return PlannedInstall(await client.models.plan(PlanModel(text, **wanted)))
    if options.quant:
        raise Invalid("--quant chooses among the files of a repository: a file is what it is")
    paths = find_parts(local_path(text))
    header = read_local_header(paths[0])
    if options.projector:
        paths += find_parts(local_path(options.projector))
        read_local_header(paths[-1])
    files = await describe_files(paths)
    projector = files.pop() if options.projector else None
    request = PlanModel(files=tuple(files), header=header, projector=projector, **wanted)
    described = (*files, *([projector] if projector is not None else ()))
    return PlannedInstall(await client.models.plan(request), tuple(zip(paths, described, strict=True)))


async def prepare_install(
    client: Client, planned: PlannedInstall, request: InstallModel, options: SourceOptions
) -> InstallModel:
    """Upload what has to be uploaded. Returns the request with the definition."""
    from msgspec.structs import replace

    plan = planned.plan
    if not options.quiet:
        print_plan(plan)
    if "***" in to_yaml(plan.definition):  # users and passwords are hidden in answers: the controller plans once more
        ready = replace(request, model="", source=request.model, quant=options.quant)
    else:
        ready = replace(request, model="", name="", overrides={}, definition=plan.definition, source=plan.source)
    if planned.uploads:
        await _refuse_early(client, ready)
        await upload_files(client, planned.uploads, install_command(request.model, options))
    return ready


async def _refuse_early(client: Client, request: InstallModel) -> None:
    """Raises what the install would, before gigabytes are uploaded for nothing."""
    try:
        await client.models.install(request, plan=True)
    except Invalid as error:
        if "for a soak" not in error.message:  # the answer of a controller that plans only trials
            raise


def install_command(file: str, options: SourceOptions) -> str:
    """For users, to continue an interrupted upload: without the key and the URL of the fleet. Pure."""
    words = ["corral", "models", "install", file]
    words += ["--as", options.name] if options.name else []
    words += ["--mmproj", options.projector] if options.projector else []
    command = shlex.join(words) + (" …" if options.overrides else "")
    return command if len(command) <= _MAX_COMMAND and command.isprintable() else ""


def print_plan(plan: InstallPlan) -> None:
    """Why this one: on stderr, because it is not the result."""
    print_note(printable(plan.text))
    for note in plan.notes:
        print_note(f"Note: {printable(note)}")


def print_plans(plans: Sequence[InstallPlan], *, as_json: bool) -> None:
    """For --dry-run: the choices and the definition."""
    if as_json:
        print_json(plans)
        return
    for plan in plans:
        print_plan(plan)
        for choice in plan.choices:
            if not choice.chosen:
                print_note(f"  {printable(choice.text)}")
        for line in to_yaml(plan.definition).splitlines():
            print_line(printable(line))
