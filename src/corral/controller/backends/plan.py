"""Plans the next step for each backend of one node: compares the desired with the actual state. Pure
(docs/explanation/design.md#intents).

`plan` keeps no state between calls: the intents of the node record what was tried, and the inventory shows the result.
`rollout.py` decides which of several nodes goes first, `outcomes.py` how an observation changes an intent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from enum import StrEnum

from corral.contract.messages.backends import NodeBackend
from corral.controller.backends.evidence import UNVERIFIED, Evidence, compare, why_not
from corral.controller.backends.rules import Unwanted, Wanted, has_to_go
from corral.controller.inventory.installed import Installed, find_installed
from corral.controller.orders.order import Build, Send
from corral.store.records import BackendIntent, IntentStage, OrderKind

# A heartbeat sent before an order ended still lists the old state: a difference from a state that was just reached
# counts only after this time.
STALE_INVENTORY = timedelta(seconds=30)
# A worker that has sent heartbeats for this time without listing an accepted order does not have the order.
FORGOTTEN = timedelta(seconds=60)

# An order may be in transit for this time, even to a worker that has been replaced: an inventory reported earlier
# shows nothing about the order's result.
ARRIVED = timedelta(seconds=5)

# A call whose timeout passed this long ago has ended, even if its observation was lost.
OVERDUE = timedelta(seconds=60)


@dataclass(frozen=True)
class NoBuild:
    """No build fits the node. Waiting does not change that; another gallery, node or rule does."""

    reason: str


@dataclass(frozen=True)
class NotLookedUp:
    """The build is not known yet."""

    reason: str = "its build is being looked up"
    until: datetime | None = None  # time of the next attempt, after a failed lookup


@dataclass(frozen=True)
class NodeWorld:
    id: str
    name: str
    status: str
    accepts: bool = True  # the worker replies at once and reports later; LocalAI workers reply when they have finished
    bus_down: bool = False
    boot_id: str = ""
    reported_at: datetime | None = None  # when the node last listed its orders; for a LocalAI worker, its backends
    known: bool = True  # False: the worker has not reported an inventory since it started
    just_read: bool = False  # the inventory was read after the observations of this pass
    backends: tuple[NodeBackend, ...] = ()
    orders: frozenset[tuple[str, int]] = (
        frozenset()
    )  # (operation, attempt) that the node lists as running or just ended
    cured: frozenset[tuple[str, int]] = frozenset()  # of these, the refused ones whose reason no longer holds
    intents: Mapping[str, BackendIntent] = field(default_factory=dict)
    stopping: frozenset[str] = frozenset()  # cancelled operations whose orders have to stop
    keeping: frozenset[str] = frozenset()  # of these, the paused ones: the node keeps what it has downloaded

    def find(self, backend: str, variant: str = "") -> Installed | None:
        return find_installed(self.backends, backend, variant)


@dataclass(frozen=True)
class Done:
    """The inventory shows the desired state, which is the only proof of success."""

    backend: str
    operation: str
    generation: int = 0
    kind: OrderKind = OrderKind.INSTALL
    digest: str = ""
    version: str = ""  # as the node reports it
    note: str = ""  # a reservation about this success, for users


@dataclass(frozen=True)
class Skip:
    backend: str
    operation: str
    reason: str


class HoldCause(StrEnum):
    NODE = "node"  # the node is not reachable
    TURN = "turn"  # something else comes first
    STOPPED = "stopped"  # another node failed to switch, so this one does not switch
    RETRY = "retry"  # the last attempt failed; `until` is the time of the next one
    PARKED = "parked"  # the last attempt failed for a reason that another attempt does not cure


@dataclass(frozen=True)
class Hold:
    """The order is due, but cannot be sent now."""

    backend: str
    operation: str
    kind: OrderKind
    why: HoldCause
    reason: str
    until: datetime | None = None


@dataclass(frozen=True)
class Wait:
    """The worker works on the order, as far as the controller knows."""

    backend: str
    operation: str
    kind: OrderKind
    running: bool = False  # the worker did not reply in time


@dataclass(frozen=True)
class Fail:
    """The worker reported success, but the inventory does not show the result."""

    backend: str
    operation: str
    reason: str


@dataclass(frozen=True)
class Stop:
    """Cancel an order that is no longer required."""

    backend: str
    operation: str
    attempt: int
    keep: bool = False  # the operation was paused: the worker keeps what it has downloaded


@dataclass(frozen=True)
class Drop:
    """Close an intent that no rule requires any more."""

    backend: str


Step = Send | Done | Skip | Hold | Wait | Fail | Stop | Drop
BuildOrNot = Build | NoBuild | NotLookedUp


def plan(
    node: NodeWorld,
    wanted: Mapping[str, Wanted | Unwanted],
    builds: Mapping[str, BuildOrNot],
    now: datetime,
    *,
    epoch: int = 0,
) -> list[Step]:
    """`wanted`: the folded rules. `builds`: for each wanted backend, the build that fits this node. `epoch`: of the
    current lease; the controller that sent an order under an older epoch can no longer receive the reply."""
    steps: list[Step] = []
    for backend in sorted(wanted.keys() | node.intents.keys()):
        steps.extend(_Backend(node, backend, node.intents.get(backend), now, epoch).steps(wanted, builds))
    return steps


class _Backend:
    """Plans one backend on one node."""

    def __init__(self, node: NodeWorld, name: str, intent: BackendIntent | None, now: datetime, epoch: int) -> None:
        self.node = node
        self.name = name
        self.intent = intent
        self.now = now
        self.epoch = epoch

    def steps(self, wanted: Mapping[str, Wanted | Unwanted], builds: Mapping[str, BuildOrNot]) -> list[Step]:
        want = wanted.get(self.name)
        build = builds.get(self.name, NotLookedUp())
        if (want is None or not self._is_mine(want)) and (self._may_be_running() or self._is_to_be_stopped()):
            return self._older_order(want, build)
        match want:
            case None:
                return self._nothing_more()
            case Wanted():
                step = self._wanted(want, build)
            case Unwanted():
                step = self._unwanted(want, wanted)
        if isinstance(step, Skip) and not self._may_be_running():
            return [step, *self._nothing_more()]
        return [step] if step is not None else []

    def _nothing_more(self) -> list[Step]:
        settled = self.intent is None or self.intent.stage in (IntentStage.DONE, IntentStage.IDLE)
        return [] if settled else [Drop(self.name)]

    def _older_order(self, want: Wanted | Unwanted | None, build: BuildOrNot) -> list[Step]:
        """The orders for one backend are serial: the running one ends first, or is stopped if it has become useless."""
        assert self.intent is not None
        steps: list[Step] = []
        cancelled = self._is_to_be_stopped()
        useful = isinstance(want, Wanted) and isinstance(build, Build) and build.digest == self.intent.digest
        reachable = self.node.status == "healthy" and not self.node.bus_down
        # The reply to a stop also shows whether an unconfirmed order runs at all.
        senseless = want is not None and (not useful or self._is_unsure(self.intent))
        if self.node.accepts and reachable and (cancelled or senseless):
            paused = self.intent.operation_id in self.node.keeping
            steps.append(Stop(self.name, self.intent.operation_id, self.intent.attempt, keep=paused))
        if want is not None:
            kind = OrderKind.DELETE if isinstance(want, Unwanted) else OrderKind.INSTALL
            steps.append(
                self._away(want, kind) or self._hold(want, kind, HoldCause.TURN, "waits for an earlier order to end")
            )
        return steps

    def _wanted(self, want: Wanted, build: BuildOrNot) -> Step | None:
        match build:
            case NotLookedUp(reason, until):
                return self._hold(want, OrderKind.INSTALL, HoldCause.RETRY if until else HoldCause.TURN, reason, until)
            case NoBuild(reason):
                return Skip(self.name, want.operation, reason)
            case Build():
                pass
        there = self.node.find(self.name, build.variant)
        if self.node.known and there is not None and self._is_it(there, build, want):
            if not self._is_proof(want):
                return self._hold(want, OrderKind.INSTALL, HoldCause.TURN, "waits for the node's inventory")
            return self._done(want, OrderKind.INSTALL, there, self._note(there, build, want))
        fetched = there is not None and bool(build.digest) and build.digest in there.beside
        order = Send(
            self.name,
            self._kind(want, build, there, fetched=fetched),
            build,
            want.generation,
            want.operation,
            0,
            force=want.force and there is not None,
            before=there.mark if there is not None else "",
            max_parallel=want.max_parallel,
            fetched=fetched and not want.force,
        )
        return self._send_or_hold(want, order)

    def _kind(self, want: Wanted, build: Build, there: Installed | None, *, fetched: bool) -> OrderKind:
        """Before a node-by-node upgrade all nodes download the build at once, so that each switch is short. Without a
        digest the inventory could not show that the download is complete."""
        if there is None or want.force:
            return OrderKind.INSTALL
        in_two = bool(want.max_parallel) and self.node.accepts and bool(build.digest)
        return OrderKind.FETCH if in_two and not fetched else OrderKind.UPGRADE

    def _unwanted(self, want: Unwanted, wanted: Mapping[str, Wanted | Unwanted]) -> Step | None:
        there = self.node.find(self.name)
        if self.node.known and not has_to_go(self.node.backends, self.name, wanted):
            if not self._is_proof(want):
                return self._hold(want, OrderKind.DELETE, HoldCause.TURN, "waits for the node's inventory")
            return self._done(want, OrderKind.DELETE)
        if self.node.known and there is not None and there.system:
            return Skip(self.name, want.operation, "it belongs to the system there and cannot be removed")
        return self._send_or_hold(want, Send(self.name, OrderKind.DELETE, None, want.generation, want.operation, 0))

    def _is_proof(self, want: Wanted | Unwanted) -> bool:
        """Whether the stored inventory is recent enough to prove the desired state. An order of this rule only brings
        that state about; an order of an earlier rule may have undone it after the inventory was reported."""
        intent = self.intent
        if intent is None or intent.sent_at is None or self._is_mine(want) or self.node.just_read:
            return True
        if (
            intent.operation_id,
            intent.attempt,
        ) in self.node.orders:  # the same heartbeat lists the order and the inventory
            return True
        if self.node.reported_at is None:
            return False
        # A LocalAI worker has received the call at once, or not at all.
        in_transit = ARRIVED if self.node.accepts else timedelta()
        return self.node.reported_at - intent.sent_at > in_transit

    def _is_it(self, there: Installed, build: Build, want: Wanted) -> bool:
        intent = self.intent if self._is_mine(want) else None
        if intent is not None and intent.stage is IntentStage.DONE:
            return there.digest == intent.digest  # unchanged since it was found
        if not self.node.accepts and self.intent is not None and self.intent.generation > want.generation:
            return True  # an earlier rule holds again, but a LocalAI worker cannot go back: it would install the newest
        fetched = self._digest_before(there, want) is not None
        if want.force and not fetched:
            return False
        if (evidence := self._evidence(there, build, want)) is not Evidence.NONE:
            return evidence is Evidence.MATCHES
        if there.system and self.node.accepts and build.digest:
            return False
        # There is nothing to compare: the install date proves an upgrade, the presence proves an install.
        upgrading = want.upgraded or (intent is not None and intent.kind is OrderKind.UPGRADE)
        return fetched if upgrading else True

    def _evidence(self, there: Installed, build: Build, want: Wanted) -> Evidence:
        since = self._digest_before(there, want)
        return compare(there, build.digest, build.version, installed_since=since, by_digest=self.node.accepts)

    def _digest_before(self, there: Installed, want: Wanted) -> str | None:
        """The digest that was installed when this rule's order was sent; None if nothing was installed since."""
        intent = self.intent if self._is_mine(want) else None
        return there.digest_before(intent.before) if intent is not None and intent.stage is IntentStage.SENT else None

    def _note(self, there: Installed, build: Build, want: Wanted) -> str:
        upgraded = self.intent is not None and self.intent.kind is OrderKind.UPGRADE
        by_date = upgraded and not self.node.accepts and self._digest_before(there, want) is not None
        return UNVERIFIED if by_date and self._evidence(there, build, want) is Evidence.NONE else ""

    def _done(
        self, want: Wanted | Unwanted, kind: OrderKind, there: Installed | None = None, note: str = ""
    ) -> Done | None:
        if self._is_mine(want) and self.intent is not None and self.intent.stage is IntentStage.DONE:
            return None
        digest, version = (there.digest, there.version) if there is not None else ("", "")
        return Done(self.name, want.operation, want.generation, kind, digest, version, note)

    def _send_or_hold(self, want: Wanted | Unwanted, order: Send) -> Step | None:
        intent = self.intent if self._is_mine(want) else None
        if (away := self._away(want, order.kind)) is not None:
            # Only the bus connection is lost: the worker goes on with the order it received.
            if intent is not None and self.node.status == "healthy" and self.node.bus_down and self._may_be_running():
                return Wait(self.name, want.operation, intent.kind, intent.running)
            return away
        fresh = replace(order, attempt=(self.intent.attempt if self.intent else 0) + 1)
        if intent is None or self._is_cured(intent):
            return fresh
        match intent.stage:
            case IntentStage.IDLE:
                return fresh
            case IntentStage.DONE:
                settled = intent.updated_at is None or self.now - intent.updated_at > STALE_INVENTORY
                return fresh if settled else None
            case IntentStage.PARKED:
                if intent.boot_id and self.node.boot_id != intent.boot_id:
                    return fresh  # the worker has restarted: the reason may be gone
                return self._hold(want, order.kind, HoldCause.PARKED, intent.reason)
            case IntentStage.WAITING:
                if intent.next_try_at is not None and intent.next_try_at > self.now:
                    why = HoldCause.RETRY if intent.failures else HoldCause.TURN
                    return self._hold(want, order.kind, why, intent.reason, intent.next_try_at)
                return fresh
            case IntentStage.SENT:
                return self._in_progress(want, intent, order)

    def _in_progress(self, want: Wanted | Unwanted, intent: BackendIntent, order: Send) -> Step:
        waiting = Wait(self.name, want.operation, intent.kind, intent.running)
        if intent.answered:
            if intent.kind is OrderKind.FETCH and order.kind is not OrderKind.FETCH:
                return replace(order, attempt=intent.attempt + 1)
            return Fail(self.name, want.operation, self._why_not_done(want, order.build))
        again = replace(order, kind=intent.kind, attempt=intent.attempt, again=True)
        if not self.node.accepts:
            if self._is_our_open_call(intent):
                return waiting
            if not self._has_time(intent):  # its time is over and the inventory shows nothing: send a new order
                return replace(order, attempt=intent.attempt + 1)
            return replace(waiting, running=True)
        if intent.accepted_at is None and (intent.operation_id, intent.attempt) not in self.node.orders:
            return again if self._is_unsure(intent) else waiting
        return again if self._was_lost(intent) else waiting

    def _is_cured(self, intent: BackendIntent) -> bool:
        """The order failed, and the node reports that the reason no longer holds."""
        failed = intent.stage in (IntentStage.PARKED, IntentStage.WAITING) and intent.failures > 0
        return failed and (intent.operation_id, intent.attempt) in self.node.cured

    def _why_not_done(self, want: Wanted | Unwanted, build: Build | None) -> str:
        if isinstance(want, Wanted) and build is not None and not self.node.accepts:
            there = self.node.find(self.name, build.variant)
            if there is not None and self._evidence(there, build, want) is Evidence.DIFFERS:
                return why_not(there, build.digest, build.version)
        return "the node reported success, but its inventory does not show the result"

    def _was_lost(self, intent: BackendIntent) -> bool:
        """The worker does not have the order: it restarted, never received the order, or ended it too long ago to list
        it."""
        if (intent.operation_id, intent.attempt) in self.node.orders:
            return False
        if self.node.known and intent.boot_id and self.node.boot_id != intent.boot_id:
            return True
        reported, since = self.node.reported_at, intent.accepted_at or intent.sent_at
        return reported is not None and since is not None and reported - since > FORGOTTEN

    def _is_to_be_stopped(self) -> bool:
        """The order was cancelled and may still run: a controller may have died between the send and the reply."""
        intent = self.intent
        if intent is None or intent.stage is not IntentStage.SENT or intent.answered or not self.node.accepts:
            return False
        return intent.operation_id in self.node.stopping and not self._was_lost(intent)

    def _is_our_open_call(self, intent: BackendIntent) -> bool:
        """This controller still waits for the reply to its call."""
        open_until = intent.next_try_at + OVERDUE if intent.next_try_at is not None else self.now
        return intent.epoch == self.epoch and not intent.running and self.now < open_until

    def _has_time(self, intent: BackendIntent) -> bool:
        """A LocalAI worker may still work on the order. An order without a deadline was sent when the node ran a Corral
        worker."""
        return intent.next_try_at is not None and intent.next_try_at > self.now

    def _may_be_running(self) -> bool:
        """Whether an order for this backend, of any rule, may be running on the node."""
        intent = self.intent
        if intent is None or intent.stage is not IntentStage.SENT or intent.answered:
            return False
        if not self.node.accepts:
            return self._has_time(intent) or self._is_our_open_call(intent) or self._may_have_changed(intent)
        return not self._was_lost(intent)

    def _may_have_changed(self, intent: BackendIntent) -> bool:
        """The order's time is over without a reply, and the stored inventory is older than that."""
        reported, until = self.node.reported_at, intent.next_try_at
        return until is not None and (reported is None or reported <= until)

    def _is_unsure(self, intent: BackendIntent) -> bool:
        """The worker has not confirmed the order, and no call waits for the confirmation any more."""
        if intent.accepted_at is not None or (intent.operation_id, intent.attempt) in self.node.orders:
            return False
        due = intent.next_try_at is not None and intent.next_try_at <= self.now
        return due or intent.epoch != self.epoch

    def _is_mine(self, want: Wanted | Unwanted) -> bool:
        return self.intent is not None and self.intent.generation == want.generation

    def _away(self, want: Wanted | Unwanted, kind: OrderKind) -> Hold | None:
        node = self.node
        if node.status != "healthy":
            return self._hold(want, kind, HoldCause.NODE, f"node {node.status}, will retry when healthy")
        if node.bus_down:
            return self._hold(want, kind, HoldCause.NODE, "the node cannot reach the bus, will retry when it can")
        if not node.known:
            return self._hold(want, kind, HoldCause.TURN, "waits for the node's inventory")
        return None

    def _hold(
        self, want: Wanted | Unwanted, kind: OrderKind, why: HoldCause, reason: str, until: datetime | None = None
    ) -> Hold:
        return Hold(self.name, want.operation, kind, why, reason, until)
