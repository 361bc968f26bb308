"""Explains an operation, and the rollout that belongs to it, in sentences with the numbers that decide. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from corral.contract.admin import OperationNodeView, OperationView
from corral.contract.rollouts import RolloutClassView, RolloutView
from corral.contract.why import WhyOperation, WhyRollout

MAX_NAMED = 3


def explain(operation: OperationView, rollout: RolloutView | None) -> WhyOperation:
    lines = [*_of_nodes(operation.nodes), *(_of_rollout(rollout) if rollout is not None else ())]
    return WhyOperation(operation, tuple(lines), rollout)


def _of_nodes(rows: Sequence[OperationNodeView]) -> Iterator[str]:
    """One sentence for each reason for which nodes are not done."""
    reasons: dict[tuple[str, str], list[OperationNodeView]] = {}
    for row in rows:
        if row.status not in ("success", "skipped"):
            reasons.setdefault((row.status, row.error or row.phase), []).append(row)
    for (status, reason), chosen in sorted(reasons.items()):
        names = [row.node_name for row in chosen]
        where = ", ".join(names[:MAX_NAMED]) + (f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else "")
        failures = max(row.failures for row in chosen)
        again = f"; failed {failures} times, next attempt {chosen[0].next_retry_at or 'when a person acts'}"
        yield f"{where}: {status}" + (f", {reason}" if reason else "") + (again if status == "error" else "")


def explain_rollout(rollout: RolloutView, rows: Sequence[OperationNodeView] = ()) -> WhyRollout:
    """`rows`: of its operation, which say what each node waits for."""
    return WhyRollout(rollout, (*_of_rollout(rollout), *_of_nodes(rows)))


def _of_rollout(rollout: RolloutView) -> Iterator[str]:
    yield f"rollout: {rollout.message}"
    if rollout.plan:
        yield f"plan: {rollout.plan}"
    what = "version" if rollout.is_corral else "revision" if rollout.model else "build"
    for each in rollout.classes:
        yield _of_trial(rollout, each) if rollout.model else _of_class(rollout, each)
        yield from (f"  {figure.words}: {'worse' if figure.worse else 'within the limit'}" for figure in each.figures)
        if each.state == "soaking" and not each.figures:
            yield (
                f"  too few requests to judge yet: {each.new_requests} by the new {what}, {each.old_requests} by the "
                f"old one; {rollout.min_requests} of each are needed, of the same model"
            )
    for operation in rollout.reverted_by:
        yield f"nodes return to their previous version: `corral ops watch {operation[:8]}`"


def _of_trial(rollout: RolloutView, each: RolloutClassView) -> str:
    match each.state:
        case "passed":
            return f"{each.name}: passed: {each.passed}"
        case "soaking":
            waits = f"; {each.waiting}" if each.waiting else ""
            share = f"{rollout.percent} % of the requests"
            return f"{each.name}: soaks for {rollout.soak}, {each.soaked_s:.0f} s so far, with {share}{waits}"
        case _:
            return f"{each.name}: no replica of it is ready yet"


def _of_class(rollout: RolloutView, each: RolloutClassView) -> str:
    words = f"{each.name} ({len(each.nodes)} {'node' if len(each.nodes) == 1 else 'nodes'})"
    match each.state:
        case "passed":
            return f"{words}: passed on {each.canary}: {each.passed}"
        case "soaking":
            waits = f"; {each.waiting}" if each.waiting else ""
            return f"{words}: {each.canary} soaks for {rollout.soak}, {each.soaked_s:.0f} s so far{waits}"
        case "canary":
            return f"{words}: {each.canary} switches first" + (f"; {each.waiting}" if each.waiting else "")
        case _:
            return f"{words}: no node is ready to switch first"
