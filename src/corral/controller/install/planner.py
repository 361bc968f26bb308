"""Plans the install of a model from a source: asks the hub or the server, chooses for the fleet, derives a definition.

Nothing is stored and nothing is fetched but the header of one file.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Protocol
from urllib.parse import quote

import aiohttp
import msgspec

from corral.blobs.transfer.remote import UrlRemote, display_url
from corral.contract.catalogue import InstallModel
from corral.contract.gguf import GgufHeader
from corral.contract.installs import UPLOAD_SCHEME, InstallPlan, LocalFile, PlanModel, PlannedChoice
from corral.contract.models import read_definition
from corral.contract.sources import is_digest, is_safe_path
from corral.controller.files.hubs import Hubs
from corral.controller.files.hubs.hub import Hub, HubFile, HubSettings, Listing
from corral.controller.files.snapshots import is_chosen
from corral.controller.install.choose import (
    Fitting,
    choose,
    evaluate_choices,
    explain,
    fitting_nodes,
    is_wanted,
    planned_model,
    usual_choice,
    where,
)
from corral.controller.install.derive import (
    FOLDER_BACKENDS,
    IGNORED,
    LLAMA_CPP,
    HubFolder,
    context_sizes,
    derive_definition,
    derive_folder_definition,
    derive_name,
    wanted_context,
)
from corral.controller.install.gguf_files import (
    QuantChoice,
    SourceFile,
    choose_file,
    group_choices,
    plain_name,
    quant_of,
)
from corral.controller.install.remote_header import HeaderReader
from corral.controller.install.sources import HubSource, WebSource, parse_source
from corral.controller.scheduler.placement import evaluate_nodes
from corral.controller.scheduler.world import World
from corral.gallery.models.definition import merged
from corral.kit.errors import Denied, Invalid, NoCapacity, NotFound
from corral.kit.humanize import format_bytes

MAX_SHOWN = 8
SAFETENSORS = ".safetensors"
BUILD_WAIT_S = 15.0  # soon after the start of a fleet; without builds nothing fits, and what is chosen lasts


class FleetMemory(Protocol):
    async def world(self, backends: Collection[str], *, wait_s: float | None = None) -> World:
        """The fleet as placement sees it, with builds of these backends looked up, as far as that takes no longer."""


class InstallPlanner:
    def __init__(
        self,
        session: aiohttp.ClientSession,
        hub: HubSettings,
        fleet: FleetMemory,
        *,
        reader: HeaderReader | None = None,
    ) -> None:
        self._session = session
        self._hubs = Hubs(session, hub)
        self._fleet = fleet
        self._reader = reader or HeaderReader()

    async def plan(self, request: PlanModel) -> InstallPlan:
        """Raises Invalid, NotFound, Denied, Unreachable and Failed about the source, NoCapacity when no node has the
        memory."""
        if bool(request.source) == bool(request.files):
            raise Invalid("give either a source or files")
        if request.files:
            return await self._plan_upload(request)
        source = parse_source(
            request.source, hub_url=self._hubs.huggingface.url, modelscope_url=self._hubs.modelscope.url
        )
        if isinstance(source, WebSource):
            return await self._plan_web(source, request)
        return await self._plan_hub(source, request)

    async def resolve(self, request: InstallModel) -> InstallModel:
        """The request with the definition that its source results in."""
        if request.model or request.variant:
            raise Invalid("give a model of a gallery or a source, not both")
        plan = await self.plan(
            PlanModel(request.source, quant=request.quant, name=request.name, overrides=request.overrides)
        )
        return msgspec.structs.replace(request, definition=plan.definition, overrides={}, source=plan.source)

    async def _plan_hub(self, source: HubSource, request: PlanModel) -> InstallPlan:
        hub = self._hubs.choose(is_modelscope=source.is_modelscope)
        listing = await hub.list_(source.repository, source.revision)
        choices = _hub_choices(source, listing, hub)
        pinned = f"{_written(hub)}{source.repository}@{listing.commit}"
        if not choices:
            return await self._plan_folder(source, hub, listing, request, pinned)
        quant = request.quant or source.quant
        if quant and not any(is_wanted(choice, quant) for choice in choices):
            raise NotFound(f"{source.repository} has no {quant}; it has {_listed(choices)}")
        first = choices[-1].files[0]  # of the smallest: all of them have the same shape
        header = await self._read_header(hub, hub.file_url(source.repository, listing.commit, first.path))
        name = request.name or derive_name(
            plain_name(source.path) if source.path else source.repository.rpartition("/")[2]
        )
        plan = await self._plan_gguf(request, name, choices, header, quant, urls=(hub.page_url(source.repository),))
        chosen = next((each.quant for each in plan.choices if each.chosen), "")
        at_path = f"{pinned}/{source.path}" if source.path else pinned + (f":{chosen}" if chosen else "")
        return _with_source(plan, at_path)

    async def _plan_web(self, source: WebSource, request: PlanModel) -> InstallPlan:
        read = await self._reader.read(UrlRemote(self._session, source.url))
        file = SourceFile(source.name, source.url, read.size_bytes)
        choice = QuantChoice(quant_of(source.name), (file,))
        name = request.name or derive_name(plain_name(source.name))
        plan = await self._plan_gguf(request, name, [choice], read.header, choice.quant)
        return _with_source(plan, display_url(source.url))

    async def _plan_upload(self, request: PlanModel) -> InstallPlan:
        files = tuple(map(_uploaded, request.files))
        projector = _uploaded(request.projector) if request.projector is not None else None
        choice = QuantChoice(quant_of(files[0].path), files, projector)
        name = request.name or derive_name(plain_name(files[0].path))
        plan = await self._plan_gguf(request, name, [choice], request.header, choice.quant)
        return _with_source(plan, f"uploaded {files[0].path}")

    async def _plan_gguf(
        self,
        request: PlanModel,
        name: str,
        choices: Sequence[QuantChoice],
        header: GgufHeader | None,
        quant: str,
        urls: Sequence[str] = (),
    ) -> InstallPlan:
        if header is not None and header.kind in ("adapter", "mmproj"):
            raise Invalid(f"this file is no model but {_KINDS[header.kind]}: install the model that it belongs to")

        def define(choice: QuantChoice, context_size: int) -> dict[str, Any]:
            whole = derive_definition(name, choice, header, context_size=context_size, urls=urls)
            return merged(whole, request.overrides) | {"name": name}

        wanted = wanted_context(request.overrides)
        world = await self._fleet.world((LLAMA_CPP,), wait_s=BUILD_WAIT_S)
        fittings = evaluate_choices(world, choices, header, (wanted,) if wanted else context_sizes(header), define)
        chosen = _pick(world, fittings, quant)
        definition = read_definition(define(chosen.choice, chosen.context_size))
        return InstallPlan(
            source="",
            definition=definition.whole,
            choices=tuple(_shown(each, chosen) for each in fittings),
            text=explain(chosen, fittings),
            notes=_notes(world, chosen, header, wanted),
            fits=bool(chosen.nodes),
        )

    async def _plan_folder(
        self, source: HubSource, hub: Hub, listing: Listing, request: PlanModel, pinned: str
    ) -> InstallPlan:
        """A repository of safetensors, for an engine that reads folders."""
        files = [file for file in listing.files if is_chosen(file.path, (), IGNORED)]
        weights = sum(file.size_bytes for file in files if file.path.endswith(SAFETENSORS))
        if not weights or not any(file.path == "config.json" for file in files):
            raise NotFound(
                f"{source.repository} has no GGUF file and no safetensors with a config.json: no backend can run it; "
                f"search the hub for a GGUF version of it (owner/{source.repository.rpartition('/')[2]}-GGUF)"
            )
        if source.quant or request.quant:
            raise NotFound(f"{source.repository} has no GGUF files to choose a quantisation from")
        world = await self._fleet.world(FOLDER_BACKENDS, wait_s=BUILD_WAIT_S)
        name = request.name or derive_name(source.repository.rpartition("/")[2])
        reasons: list[str] = []
        for backend in FOLDER_BACKENDS:
            whole = derive_folder_definition(
                name, HubFolder(source.repository, listing.commit, hub.scheme, hub.page_url(source.repository)), backend
            )
            definition = read_definition(merged(whole, request.overrides) | {"name": name})
            model = planned_model(definition, weights, None)
            nodes, why_not = fitting_nodes(evaluate_nodes(world, model))
            if nodes:
                text = f"{backend}, {format_bytes(weights)}: fits on {', '.join(each.node for each in nodes)}"
                choice = PlannedChoice("", weights, model.memory.total_bytes, tuple(n.node for n in nodes), True, text)
                return InstallPlan(pinned, definition.whole, (choice,), text, fits=True)
            reasons += [f"{backend} on {reason}" for reason in why_not[:MAX_SHOWN]]
        raise NoCapacity(
            f"{source.repository} has no GGUF file, and no node can run its safetensors "
            f"({format_bytes(weights)}): {'; '.join(reasons) or 'there are no nodes'}. "
            "Install a GGUF version of it, or add a node with enough memory",
            retry_after_s=60.0,
        )

    async def _read_header(self, hub: Hub, url: str) -> GgufHeader:
        try:
            return (await self._reader.read(hub.remote(url))).header
        except Denied as error:
            raise hub.refused(error) from error


_KINDS = {"adapter": "an adapter", "mmproj": "the projector of a vision model"}


def _written(hub: Hub) -> str:
    """How users write sources of this hub."""
    return "hf://" if hub.scheme == "huggingface" else f"{hub.scheme}://"


def _hub_choices(source: HubSource, listing: Listing, hub: Hub) -> list[QuantChoice]:
    files = [_hub_file(hub, source.repository, listing.commit, file) for file in listing.files]
    if source.path:
        found = choose_file(files, source.path)
        if found is None:
            names = [file.path for file in files if file.path.lower().endswith(".gguf")]
            there = f"; it has {', '.join(names[:MAX_SHOWN])}" if names else ", and no GGUF file at all"
            raise NotFound(f"{source.repository} has no file {source.path}{there}")
        return [found]
    choices = [choice for choice in group_choices(files) if "imatrix" not in choice.files[0].path.lower()]
    models = {plain_name(choice.files[0].path).lower() for choice in choices}
    if len(models) > 1:
        paths = [choice.files[0].path for choice in choices]
        raise Invalid(
            f"{source.repository} has several models; name a file: "
            + ", ".join(f"{_written(hub)}{source.repository}/{path}" for path in paths[:MAX_SHOWN])
        )
    return choices


def _hub_file(hub: Hub, repository: str, commit: str, file: HubFile) -> SourceFile:
    uri = f"{hub.scheme}://{repository}@{commit}/{quote(file.path)}"
    return SourceFile(file.path, uri, file.size_bytes, file.sha256)


def _uploaded(file: LocalFile) -> SourceFile:
    if not is_digest(f"sha256:{file.sha256}") or file.size_bytes <= 0:
        raise Invalid("a file is named with its size and its SHA-256 in hexadecimal digits")
    if "/" in file.name or not is_safe_path(file.name) or not file.name.lower().endswith(".gguf"):
        raise Invalid(f"{file.name[:200]!r} is not the name of a GGUF file")
    return SourceFile(file.name, f"{UPLOAD_SCHEME}{file.sha256}/{quote(file.name)}", file.size_bytes, file.sha256)


def _pick(world: World, fittings: Sequence[Fitting], quant: str) -> Fitting:
    """What the caller wants is taken though it fits nowhere: nodes come and go."""
    if quant:
        return next(each for each in fittings if is_wanted(each.choice, quant))
    if not world.nodes:
        return usual_choice(fittings)
    chosen = choose(fittings)
    if chosen is None:
        smallest = min(fittings, key=lambda each: each.memory.total_bytes)
        raise NoCapacity(
            f"no quantisation fits: the smallest, {smallest.label}, needs "
            f"{format_bytes(smallest.memory.total_bytes)} ({smallest.memory.how}). {'; '.join(smallest.why_not)}. "
            "Add a node with more memory, or install it all the same with --quant",
            retry_after_s=60.0,
        )
    return chosen


def _shown(fitting: Fitting, chosen: Fitting) -> PlannedChoice:
    return PlannedChoice(
        quant=fitting.choice.quant,
        size_bytes=fitting.choice.size_bytes,
        memory_bytes=fitting.memory.total_bytes,
        fits_on=tuple(each.node for each in fitting.nodes),
        chosen=fitting is chosen,
        text=f"{fitting.label}: {where(fitting)}",
    )


def _notes(world: World, chosen: Fitting, header: GgufHeader | None, wanted: int) -> tuple[str, ...]:
    notes = []
    if not world.nodes:
        notes.append("there is no node yet: whether it fits is found out when one joins")
    elif not chosen.nodes:
        notes.append(f"no node can run it now: {'; '.join(chosen.why_not)}")
    trained = header.number("context_length") if header is not None else 0
    if not wanted and trained > chosen.context_size:
        notes.append(
            f"its context is {chosen.context_size} tokens of the {trained} it was trained for, to save memory; "
            "change it with --set context_size=N"
        )
    if not chosen.choice.size_bytes:
        notes.append("its size is not known before it is fetched")
    return tuple(notes)


def _listed(choices: Sequence[QuantChoice]) -> str:
    return ", ".join(choice.quant or choice.files[0].path for choice in choices)


def _with_source(plan: InstallPlan, source: str) -> InstallPlan:
    return InstallPlan(source, plan.definition, plan.choices, plan.text, plan.notes, plan.fits)
