"""Explanations of the scheduler as text. Pure; `why.py` prints them."""

from __future__ import annotations

from collections.abc import Iterator

from corral.cli.common.output import key_value_lines, printable
from corral.contract.loads import LoadStatus
from corral.contract.why import DECISIONS, WhyModel, WhyNode, WhyReplica, WhySpace, WhyVerdict, said_once
from corral.kit.durations import format_duration
from corral.kit.humanize import first_and_last_line, format_bytes

NODE_COLUMNS = ("NODE", "ELIGIBLE", "REASON", "NOTE")
MODEL_COLUMNS = ("MODEL", "ELIGIBLE", "REASON", "NOTE")
REPLICA_COLUMNS = ("MODEL", "NODE", "REPLICA", "STATE", "REQUESTS", "MEMORY", "IDLE", "KEPT BECAUSE IT", "PLACED")
SPACE_COLUMNS = ("MEMORY", "FREE", "TOTAL", "RESERVED", "REPLICAS", "NOTE")


def model_details(why: WhyModel) -> Iterator[str]:
    decision = DECISIONS.get(why.decision, why.decision)
    load = _load(why.load) if why.load is not None and why.load.state != "loaded" else ""
    yield from key_value_lines(
        [
            ("model", why.model),
            ("next replica", f"{decision}: {why.text}" if decision else why.text),
            ("cannot evict", "; ".join(why.kept)),
            ("needs", _needs(why)),
            ("replicas", _wanted(why)),
            ("scaling", f"{why.scaling}: {said_once(why.scaling_text, why.text)}"),
            ("load", said_once(load, why.text)),
            ("broken streams", why.streams),
        ]
    )


def verdict_row(verdict: WhyVerdict, rank: int, *, by: str) -> tuple[str, ...]:
    return (by, f"yes, {_place(rank)}" if verdict.eligible else "no", verdict.text, "; ".join(verdict.notes))


def verdict_rows(why: WhyModel) -> list[tuple[str, ...]]:
    return [verdict_row(verdict, rank, by=verdict.node) for rank, verdict in enumerate(why.nodes, 1)]


def model_rows(why: WhyNode) -> list[tuple[str, ...]]:
    return [
        (each.model, "yes" if each.eligible else "no", each.text, "; ".join(each.notes))
        for each in sorted(why.models, key=lambda each: (not each.eligible, each.model))
    ]


def numbers(verdict: WhyVerdict, *, by: str) -> Iterator[str]:
    """Every check and every line of the ranking, as text."""
    yield printable(by)
    for check in verdict.checks:
        yield printable(f"  {'ok' if check.ok else 'no':<3} {check.name:<9} {check.text}")
    for line in verdict.score:
        yield printable(f"      {line.name:<11} {line.value:<16} {line.meaning}")


def node_details(why: WhyNode) -> Iterator[str]:
    budget = ""
    if why.budget_bytes is not None:
        budget = f"{format_bytes(why.left_of_budget or 0)} left of {format_bytes(why.budget_bytes)}"
    yield from key_value_lines([("node", why.node), ("new replicas", why.text), ("budget", budget)])


def space_row(space: WhySpace) -> tuple[str, ...]:
    return (
        space.name,
        "unknown" if space.free_bytes is None else format_bytes(space.free_bytes),
        "unknown" if space.limit_bytes is None else format_bytes(space.limit_bytes),
        format_bytes(space.reserved_bytes) if space.reserved_bytes else "",
        str(space.replicas) if space.replicas else "",
        "" if space.measured or space.free_bytes is None else "usage is not measured",
    )


def replica_row(replica: WhyReplica) -> tuple[str, ...]:
    devices = f" on GPU {', '.join(map(str, replica.devices))}" if replica.devices else ""
    return (
        replica.model,
        replica.node,
        str(replica.replica),
        _state(replica),
        f"{replica.in_flight} of {replica.slots}",
        f"{format_bytes(replica.memory_bytes)}{devices}" if replica.memory_bytes else devices.strip(),
        format_duration(float(round(replica.unused_s))) if replica.unused_s is not None else "",
        replica.kept,
        replica.reason,
    )


def _state(replica: WhyReplica) -> str:
    if replica.current:
        return replica.state
    return f"{replica.state}, {'new revision on trial' if replica.on_trial else 'earlier revision'}"


def _needs(why: WhyModel) -> str:
    if not why.memory_bytes:
        return "unknown amount of memory"
    besides = f", and {format_bytes(why.host_bytes)} of RAM" if why.host_bytes else ""
    return f"{format_bytes(why.memory_bytes)}{besides} ({why.memory_how})"


def _wanted(why: WhyModel) -> str:
    where = f" on nodes with {why.selector}" if why.selector else ""
    if why.spread_all:
        return f"one on every node{where}"
    if not why.min_replicas and not why.max_replicas:
        return f"as many as requests need{where}"
    return f"{why.min_replicas} to {why.max_replicas or 'any number'}{where}"


def _load(load: LoadStatus) -> str:
    words = [load.state, f"on {load.node}" if load.node else "", f"{load.progress:.0f}%" if load.progress else ""]
    reason = first_and_last_line(load.error or load.message)
    pause = (
        f"; the next attempt starts in {format_duration(round(load.retry_after_s))}" if load.retry_after_s >= 1 else ""
    )
    return " ".join(filter(None, words)) + (f": {reason}" if reason else "") + pause


def _place(rank: int) -> str:
    return f"rank {rank}"
