"""The service for rollouts: list, show, pause, resume, promote, abort. Each action is only stored; the reconciler of
backends, of replicas for a model, or of releases for Corral itself, carries it out."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec.structs import replace

from corral.contract.rollouts import RolloutClassView, RolloutFigureView, RolloutView, RolloutWindowView
from corral.controller.operations.views import rfc3339
from corral.controller.rollouts.comparison import describe
from corral.controller.rollouts.options import describe_soak
from corral.controller.rollouts.plan import soak_words
from corral.controller.rollouts.trial import share_of, state_of_trial, trial_words
from corral.controller.runtime.change_feed import LOADS, RULES, ChangeFeed
from corral.kit.errors import Invalid
from corral.kit.log import get_log
from corral.store.engine.transactions import Store
from corral.store.records import Rollout, RolloutClass, RolloutFigure, RolloutPhase, RolloutWindow
from corral.store.tables import nodes, operations, revisions, rollouts

log = get_log(__name__)


class Rollouts:
    def __init__(self, store: Store, feed: ChangeFeed) -> None:
        self._store = store
        self._feed = feed

    async def list_views(self, *, limit: int = 50, windows: bool = False) -> list[RolloutView]:
        """The newest first."""
        async with self._store.read() as tx:
            found = await rollouts.list_(tx, limit=limit)
            known = {each.id: each for each in await operations.list_for(tx, [row.operation_id for row in found])}
            names = await nodes.list_names(tx)
        return [
            rollout_view(row, names, max_parallel=known[row.operation_id].request.max_parallel, windows=windows)
            for row in found
            if row.operation_id in known
        ]

    async def view(self, operation_id: str) -> RolloutView:
        async with self._store.read() as tx:
            rollout = await rollouts.get(tx, operation_id)
            operation = await operations.get(tx, operation_id)
            names = await nodes.list_names(tx)
        return rollout_view(rollout, names, max_parallel=operation.request.max_parallel)

    async def find_view(self, operation_id: str) -> RolloutView | None:
        async with self._store.read() as tx:
            found = await rollouts.find(tx, operation_id)
        return await self.view(operation_id) if found is not None else None

    async def pause(self, operation_id: str, *, by: str) -> str:
        """No further node switches, and soaks make no progress. A build that is worse is still reverted."""
        rollout = await self._steer(operation_id, paused_by=by)
        if rollout.trial is not None:
            return "paused: the new revision keeps its share of the requests"
        return "paused: nodes that switch now finish, no further node begins"

    async def resume(self, operation_id: str) -> str:
        await self._steer(operation_id, paused_by="")
        return "resumed"

    async def promote(self, operation_id: str, *, by: str) -> str:
        """The soaks end now, and the other nodes follow."""
        rollout = await self._steer(operation_id, promoted_by=by, paused_by="")
        if rollout.trial is not None:
            return "promoted: the new revision gets all requests as soon as it is ready, and the old replicas stop"
        return "promoted: the other nodes follow without a soak"

    async def abort(self, operation_id: str, *, by: str) -> str:
        """Every node that has switched returns to its previous version."""
        rollout = await self._steer(operation_id, aborted_by=by)
        if rollout.trial is not None:
            return "aborted: the model returns to its previous revision"
        return "aborted: nodes that have switched return to their previous version"

    async def _steer(self, operation_id: str, **changes: str) -> Rollout:
        async with self._store.write() as tx:
            await revisions.hold(tx, RULES)
            rollout = await rollouts.get(tx, operation_id)
            if rollout.is_over:
                raise Invalid(f"the rollout is over: {rollout.verdict or rollout.phase.value}")
            await rollouts.put(tx, replace(rollout, **changes))
            counter = RULES if rollout.trial is None else LOADS
            await revisions.bump(tx, counter)
            await revisions.bump(tx, "operations")
        log.info("rollout steered", operation=operation_id, **changes)
        self._feed.notify(counter, operation_id)
        self._feed.notify("operations", operation_id)
        return rollout


def rollout_view(rollout: Rollout, names: Mapping[str, str], *, max_parallel: str, windows: bool = True) -> RolloutView:
    settings, trial = rollout.settings, rollout.trial
    return RolloutView(
        operation_id=rollout.operation_id,
        backend=rollout.subject if trial is None else "",
        model="" if trial is None else rollout.subject,
        revision="" if trial is None else trial.revision,
        old_revision="" if trial is None else trial.old_revision,
        percent=share_of(rollout),
        in_place=trial is not None and trial.in_place,
        plan="" if trial is None else trial.plan,
        is_corral=rollout.is_of_corral,
        phase=rollout.phase.value,
        started_at=rfc3339(rollout.started_at),
        ended_at=rfc3339(rollout.ended_at),
        max_parallel=max_parallel,
        soak=describe_soak(settings),
        max_errors=settings.max_errors,
        max_slowdown=settings.max_slowdown,
        min_requests=settings.min_requests,
        paused_by=rollout.paused_by,
        promoted_by=rollout.promoted_by,
        aborted_by=rollout.aborted_by,
        verdict=rollout.verdict,
        reverted_by=rollout.reverted_by,
        message=message_of(rollout),
        classes=tuple(_class_view(rollout, each, names, windows=windows) for each in rollout.classes),
    )


def message_of(rollout: Rollout) -> str:
    """The state in one sentence."""
    match rollout.phase:
        case RolloutPhase.REVERTED:
            return f"reverted: {rollout.verdict}"
        case RolloutPhase.DONE if rollout.trial is not None:
            return f"done: the model has the new revision; {state_of_trial(rollout).passed}"
        case RolloutPhase.ENDED if rollout.trial is not None:
            return f"ended: {rollout.verdict}"
        case RolloutPhase.DONE:
            return "done: every node has switched"
        case RolloutPhase.ENDED:
            return "ended: it was cancelled, or a later operation decides"
        case _ if rollout.paused_by:
            return f"paused by {rollout.paused_by}"
        case _ if rollout.trial is not None:
            return trial_words(rollout)
        case RolloutPhase.SOAK:
            return "; ".join(
                f"{each.canary_name} {soak_words(rollout, each)}" for each in rollout.classes if each.soaking
            )
        case RolloutPhase.CANARY:
            return "the first node of each hardware class switches"
        case RolloutPhase.WAVES:
            return "every class has passed; the other nodes switch"
        case _:
            return f"nodes fetch the new {rollout.what} beside the current one"


def _class_view(rollout: Rollout, state: RolloutClass, names: Mapping[str, str], *, windows: bool) -> RolloutClassView:
    own = sorted(names.get(node_id, node_id) for node_id, each in rollout.nodes.items() if each.hardware == state.name)
    if rollout.trial is not None:
        own = [state.canary_name] if state.canary_name else []
    return RolloutClassView(
        name=state.name,
        nodes=tuple(own),
        canary=state.canary_name,
        state=state_of(state),
        passed=state.passed,
        waiting=state.waiting,
        soaked_s=round(state.soaked_s, 1),
        deaths=state.deaths,
        new_requests=state.new_requests,
        old_requests=state.old_requests,
        figures=tuple(_figure_view(figure) for figure in state.figures),
        new_windows=tuple(_window_views(state.new_windows)) if windows else (),
        old_windows=tuple(_window_views(state.old_windows)) if windows else (),
    )


def state_of(state: RolloutClass) -> str:
    if state.passed:
        return "passed"
    if state.soaking:
        return "soaking"
    return "canary" if state.canary else "waiting"


def _figure_view(figure: RolloutFigure) -> RolloutFigureView:
    return RolloutFigureView(
        name=figure.name,
        model=figure.model,
        old=figure.old,
        new=figure.new,
        old_requests=figure.old_requests,
        new_requests=figure.new_requests,
        limit=figure.limit,
        certainty=figure.certainty,
        worse=figure.worse,
        words=describe(figure),
    )


def _window_views(windows: tuple[RolloutWindow, ...]) -> list[RolloutWindowView]:
    return [
        RolloutWindowView(each.at, each.requests, each.errors, each.first_token_ms, each.tokens_per_s)
        for each in windows
    ]
