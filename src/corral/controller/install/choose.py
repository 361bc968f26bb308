"""Chooses the quantisation and the context size that the fleet's memory holds, and explains the choice. Pure.

The estimates and the fits are the scheduler's: what is chosen here is what placement finds room for later. A node
counts as it would be without other models, because a load may end those; a node with room now comes first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from corral.contract.gguf import GgufHeader
from corral.contract.models import Definition, read_definition
from corral.controller.install.gguf_files import BEST, BEST_IN_RAM, QuantChoice, is_at_most, rank
from corral.controller.scheduler.memory import device_share, estimate_memory, is_ram_only
from corral.controller.scheduler.placement import Verdict, evaluate_nodes
from corral.controller.scheduler.world import Memory, Model, World
from corral.kit.humanize import format_bytes

MAX_NODES_SHOWN = 3
Define = Callable[[QuantChoice, int], dict[str, Any]]  # the definition of a choice with a context size


@dataclass(frozen=True)
class NodeFit:
    node: str
    in_ram: bool
    now: bool  # False: when other models have left
    text: str  # GPU 0: 23.5 GiB free of 24.0 GiB


@dataclass(frozen=True)
class Fitting:
    """A choice with the nodes that can hold it."""

    choice: QuantChoice
    context_size: int
    memory: Memory
    nodes: tuple[NodeFit, ...]
    why_not: tuple[str, ...] = ()  # node: reason, of the other nodes
    has_memory: bool = False  # some node has the memory, whatever else keeps the model from it

    @property
    def label(self) -> str:
        size = self.choice.size_bytes
        named = self.choice.quant or self.choice.files[0].path
        return f"{named}, {format_bytes(size)}" if size else f"{named}, size unknown"


def planned_model(definition: Definition, files_bytes: int, header: GgufHeader | None) -> Model:
    """The model as the scheduler will see it once its files are there."""
    return Model(
        definition.name,
        definition.backend,
        memory=estimate_memory(definition, files_bytes, header=header),
        tensor_parallel=definition.tensor_parallel,
        device_share=device_share(definition),
        in_ram=is_ram_only(definition),
        files=(),  # the disk is checked when files are sent
    )


def fitting_nodes(verdicts: Sequence[Verdict]) -> tuple[tuple[NodeFit, ...], tuple[str, ...]]:
    """Nodes that can hold the model, best first, and the reasons of the others."""
    fits, reasons = [], []
    for verdict in verdicts:
        if verdict.eligible and verdict.fit is not None:
            pools = verdict.fit.text.partition("; ")[2]
            fits.append(NodeFit(verdict.node, not verdict.fit.devices, True, pools))
        elif verdict.blocked_by_replicas:
            fits.append(NodeFit(verdict.node, False, False, "when other models have left"))
        else:
            reasons.append(f"{verdict.node}: {_reason(verdict)}")
    return tuple(fits), tuple(reasons)


def evaluate_choices(
    world: World, choices: Sequence[QuantChoice], header: GgufHeader | None, contexts: Sequence[int], define: Define
) -> list[Fitting]:
    """Each choice with the largest of `contexts` with which it fits on an accelerator, else in RAM, else on a node that
    other models leave first; with the smallest if it fits nowhere."""
    return [_evaluate(world, choice, header, contexts, define) for choice in choices]


def choose(fittings: Sequence[Fitting]) -> Fitting | None:
    """The best quantisation that fits: for an accelerator at most `BEST`, for RAM at most `BEST_IN_RAM`. A node with
    room now comes before one that other models have to leave, and a node with the memory before none. None: no node
    has the memory."""
    for suitable in (_fits_on_device, _fits_in_ram, _fits_later, _fits_at_all, _has_memory):
        found = [each for each in fittings if suitable(each)]
        if found:
            return min(found, key=lambda each: rank(each.choice.quant))
    return None


def usual_choice(fittings: Sequence[Fitting]) -> Fitting:
    """For a fleet without nodes: nobody knows what will fit."""
    small = [each for each in fittings if is_at_most(each.choice.quant, BEST_IN_RAM)]
    return min(small, key=lambda each: rank(each.choice.quant)) if small else fittings[-1]


def is_wanted(choice: QuantChoice, quant: str) -> bool:
    wanted = quant.upper().replace("-", "_").removeprefix("UD_")
    return wanted == choice.quant.replace("-", "_").removeprefix("UD_")


def explain(chosen: Fitting, fittings: Sequence[Fitting]) -> str:
    """Q4_K_M, 4.9 GB: fits on node-a (GPU 0: …); Q8_0 would not fit anywhere."""
    text = f"{chosen.label}: {where(chosen)}"
    better = [each for each in fittings if rank(each.choice.quant) < rank(chosen.choice.quant)]
    refused = [each.choice.quant for each in better if not each.has_memory and is_at_most(each.choice.quant, BEST)]
    if refused:
        text += f"; {refused[-1]} would not fit anywhere"
    return text


def where(fitting: Fitting) -> str:
    if not fitting.nodes:
        return f"fits on no node ({'; '.join(fitting.why_not[:MAX_NODES_SHOWN]) or 'there are no nodes'})"
    shown = ", ".join(f"{each.node} ({each.text})" for each in fitting.nodes[:MAX_NODES_SHOWN])
    more = len(fitting.nodes) - MAX_NODES_SHOWN
    return f"fits on {shown}" + (f" and {more} more" if more > 0 else "")


def _evaluate(
    world: World, choice: QuantChoice, header: GgufHeader | None, contexts: Sequence[int], define: Define
) -> Fitting:
    found = []
    for context_size in contexts:
        definition = read_definition(define(choice, context_size))
        model = planned_model(definition, choice.size_bytes, header)
        verdicts = evaluate_nodes(world, model)
        nodes, why_not = fitting_nodes(verdicts)
        has_memory = any(verdict.fits_when_empty for verdict in verdicts)
        found.append(Fitting(choice, context_size, model.memory, nodes, why_not, has_memory))
    for suitable in (_on_device_now, _somewhere_now, _fits_at_all):
        if fitting := next((each for each in found if suitable(each)), None):
            return fitting
    return found[-1]


def _on_device_now(fitting: Fitting) -> bool:
    return any(each.now and not each.in_ram for each in fitting.nodes)


def _somewhere_now(fitting: Fitting) -> bool:
    return any(each.now for each in fitting.nodes)


def _fits_on_device(fitting: Fitting) -> bool:
    return _on_device_now(fitting) and is_at_most(fitting.choice.quant, BEST)


def _fits_in_ram(fitting: Fitting) -> bool:
    return _somewhere_now(fitting) and is_at_most(fitting.choice.quant, BEST_IN_RAM)


def _fits_later(fitting: Fitting) -> bool:
    return bool(fitting.nodes) and is_at_most(fitting.choice.quant, BEST_IN_RAM)


def _fits_at_all(fitting: Fitting) -> bool:
    return bool(fitting.nodes)


def _has_memory(fitting: Fitting) -> bool:
    return fitting.has_memory and is_at_most(fitting.choice.quant, BEST_IN_RAM)


def _reason(verdict: Verdict) -> str:
    """Memory first: of several reasons it is the one that another choice changes."""
    failed = sorted((check for check in verdict.checks if not check.ok), key=lambda check: check.name != "memory")
    return failed[0].text if failed else "does not fit"
