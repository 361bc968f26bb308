"""Decides which nodes of an upgrade may switch now. Pure (docs/explanation/design.md#upgrades).

All nodes download the build at once. Then one node per variant switches first; when it has succeeded, the others
follow, as many at once as the rule allows. The first failed switch stops the rest (the failed node keeps the version
that it had) until a retry there succeeds: while the retry runs, or fails earlier than the switch, the rest still waits.
A failed download stops no other node.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from corral.controller.backends.plan import Hold, HoldCause
from corral.controller.orders.order import Send
from corral.kit.errors import Invalid
from corral.store.records import BackendIntent, IntentStage, OrderKind

DEFAULT = "25%"
ALL_AT_ONCE = ""


@dataclass(frozen=True)
class Peer:
    """A node under the same rule."""

    node_id: str
    node_name: str
    intent: BackendIntent


def parse_max_parallel(text: str) -> str:
    """`25%` or `3`, as it is stored. Raises Invalid."""
    word = text.strip()
    number, percent = word.removesuffix("%"), word.endswith("%")
    if not (number.isascii() and number.isdigit()) or not 1 <= int(number) <= (100 if percent else 100_000):
        raise Invalid(f"{text[:20]!r} is not a number of nodes: write a share such as 25%, or a number such as 3")
    return f"{int(number)}{'%' if percent else ''}"


def allowed_at_once(max_parallel: str, nodes: int) -> int:
    """At least one, or the rollout would never proceed."""
    if max_parallel.endswith("%"):
        return max(1, nodes * int(max_parallel[:-1]) // 100)
    return max(1, int(max_parallel))


def gate(sends: Mapping[str, Send], peers: Iterable[Peer], nodes: int) -> dict[str, Hold]:
    """The sends that have to wait, and why. `sends` are those of one rule, by node id; `peers` are all intents of the
    rule; `nodes` is the number of nodes that the rule covers."""
    others = list(peers)
    broken = next((peer for peer in others if _has_failed(peer.intent)), None)
    proven = {peer.intent.variant for peer in others if peer.intent.stage is IntentStage.DONE}
    # The previous order of a node that gets a new one has ended: the node must not wait for itself.
    anew = {node for node, send in sends.items() if not send.again}
    busy = [peer.intent.variant for peer in others if _is_switching(peer.intent) and peer.node_id not in anew]
    held = {}
    for node, send in sorted(sends.items()):
        if send.again or send.kind is not OrderKind.UPGRADE or send.build is None or not send.max_parallel:
            continue
        variant = send.build.variant
        if broken is not None and node != broken.node_id:
            reason = f"stopped: {broken.node_name} failed to switch: {broken.intent.reason or 'it is being retried'}"
            held[node] = _hold(send, HoldCause.STOPPED, reason)
        elif variant not in proven and variant in busy:
            held[node] = _hold(send, HoldCause.TURN, f"waits for the first node with {variant} to switch")
        elif len(busy) >= allowed_at_once(send.max_parallel, nodes):
            held[node] = _hold(send, HoldCause.TURN, f"waits for its turn: {send.max_parallel} of the nodes at once")
        else:
            busy.append(variant)
    return held


def _has_failed(intent: BackendIntent) -> bool:
    return intent.switch_failed and intent.stage is not IntentStage.DONE


def _is_switching(intent: BackendIntent) -> bool:
    return intent.stage is IntentStage.SENT and intent.kind is not OrderKind.FETCH


def _hold(send: Send, why: HoldCause, reason: str) -> Hold:
    return Hold(send.backend, send.operation, send.kind, why, reason)
