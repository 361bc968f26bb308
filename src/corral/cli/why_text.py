"""What the scheduler found, in words. Pure; `why.py` prints it."""

from __future__ import annotations

from collections.abc import Iterator

from corral.cli.output import pairs, plain, size
from corral.contract.loads import LoadStatus
from corral.contract.why import DECISIONS, WhyModel, WhyNode, WhyReplica, WhySpace, WhyVerdict, said_once
from corral.kit.durations import format_duration
from corral.kit.lines import in_short

NODE_COLUMNS = ("NODE", "TAKES IT", "BECAUSE", "NOTE")
MODEL_COLUMNS = ("MODEL", "TAKES IT", "BECAUSE", "NOTE")
REPLICA_COLUMNS = ("MODEL", "NODE", "REPLICA", "STATE", "REQUESTS", "MEMORY", "UNUSED", "STAYS BECAUSE IT", "PLACED")
SPACE_COLUMNS = ("MEMORY", "FREE", "OF", "RESERVED", "REPLICAS", "NOTE")


def model_details(told: WhyModel) -> Iterator[str]:
    decision = DECISIONS.get(told.decision, told.decision)
    load = _load(told.load) if told.load is not None and told.load.state != "loaded" else ""
    yield from pairs(
        [
            ("model", told.model),
            ("one more", f"{decision}: {told.text}" if decision else told.text),
            ("in the way", "; ".join(told.kept)),
            ("needs", _needs(told)),
            ("wanted", _wanted(told)),
            ("scaling", f"{told.scaling}: {said_once(told.scaling_text, told.text)}"),
            ("load", said_once(load, told.text)),
        ]
    )


def verdict_row(verdict: WhyVerdict, rank: int, *, by: str) -> tuple[str, ...]:
    return (by, f"yes, {_place(rank)}" if verdict.eligible else "no", verdict.text, "; ".join(verdict.notes))


def verdict_rows(told: WhyModel) -> list[tuple[str, ...]]:
    return [verdict_row(verdict, rank, by=verdict.node) for rank, verdict in enumerate(told.nodes, 1)]


def model_rows(told: WhyNode) -> list[tuple[str, ...]]:
    return [
        (each.model, "yes" if each.eligible else "no", each.text, "; ".join(each.notes))
        for each in sorted(told.models, key=lambda each: (not each.eligible, each.model))
    ]


def numbers(verdict: WhyVerdict, *, by: str) -> Iterator[str]:
    """Every check and every line of the ranking."""
    yield plain(by)
    for check in verdict.checks:
        yield plain(f"  {'ok' if check.ok else 'no':<3} {check.name:<9} {check.text}")
    for line in verdict.score:
        yield plain(f"      {line.name:<11} {line.value:<16} {line.meaning}")


def node_details(told: WhyNode) -> Iterator[str]:
    budget = ""
    if told.budget_bytes is not None:
        budget = f"{size(told.left_of_budget or 0)} left of {size(told.budget_bytes)}"
    yield from pairs([("node", told.node), ("new replicas", told.text), ("budget", budget)])


def space_row(space: WhySpace) -> tuple[str, ...]:
    return (
        space.name,
        "unknown" if space.free_bytes is None else size(space.free_bytes),
        "unknown" if space.limit_bytes is None else size(space.limit_bytes),
        size(space.reserved_bytes) if space.reserved_bytes else "",
        str(space.replicas) if space.replicas else "",
        "" if space.measured or space.free_bytes is None else "use is not measured",
    )


def replica_row(replica: WhyReplica) -> tuple[str, ...]:
    devices = f" on GPU {', '.join(map(str, replica.devices))}" if replica.devices else ""
    return (
        replica.model,
        replica.node,
        str(replica.replica),
        replica.state if replica.current else f"{replica.state}, of an earlier revision",
        f"{replica.in_flight} of {replica.slots}",
        f"{size(replica.memory_bytes)}{devices}" if replica.memory_bytes else devices.strip(),
        format_duration(float(round(replica.unused_s))) if replica.unused_s is not None else "",
        replica.kept,
        replica.reason,
    )


def _needs(told: WhyModel) -> str:
    if not told.memory_bytes:
        return "nobody knows how much memory"
    besides = f", and {size(told.host_bytes)} of RAM" if told.host_bytes else ""
    return f"{size(told.memory_bytes)}{besides} ({told.memory_how})"


def _wanted(told: WhyModel) -> str:
    where = f" on nodes with {told.selector}" if told.selector else ""
    if told.spread_all:
        return f"one on every node{where}"
    if not told.min_replicas and not told.max_replicas:
        return f"when somebody asks for it{where}"
    return f"{told.min_replicas} to {told.max_replicas or 'any number'} replicas{where}"


def _load(load: LoadStatus) -> str:
    words = [load.state, f"on {load.node}" if load.node else "", f"{load.progress:.0f}%" if load.progress else ""]
    told = in_short(load.error or load.message)
    rests = f"; nobody tries again for {format_duration(round(load.retry_after_s))}" if load.retry_after_s >= 1 else ""
    return " ".join(filter(None, words)) + (f": {told}" if told else "") + rests


def _place(rank: int) -> str:
    return "first" if rank == 1 else f"as number {rank}"
