"""Orders that replace the Corral of a worker by another version (docs/reference/wire/releases.md). Since protocol 1,
between Corral peers only.

The order is a question too: the controller repeats it until the upgrade has ended, and each reply says how far it is.
So nothing is lost when either side restarts, and the worker that took over answers for the one before it.
"""

from __future__ import annotations

from enum import StrEnum

from corral.contract.codec import Message, always
from corral.contract.messages.models import DoneReply
from corral.contract.subjects import call


class UpgradeState(StrEnum):
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    REFUSED = "refused"  # this worker does not upgrade itself


class ReleasePackage(Message, frozen=True):
    """The wheel of a dependency. The worker accepts it only if the wheel of Corral names its hash."""

    name: str = always(str)
    sha256: str = always(str)
    size_bytes: int = always(int)


class UpgradeWorker(Message, frozen=True):
    op_id: str = always(str)
    attempt: int = always(int)
    signed: str = always(str)  # a `ReleaseOrder` (contract/releases.py)
    packages: tuple[ReleasePackage, ...] = ()  # empty: the worker fetches them from the package index
    sources: tuple[str, ...] = ()  # URLs of blob listeners
    source_token: str = ""
    plan: bool = False  # only say whether it would be refused, or runs already; `signed` may be empty then


class UpgradeWorkerReply(Message, frozen=True):
    state: str = always(str)
    reason: str = ""
    phase: str = ""
    current_bytes: int = 0
    total_bytes: int = 0
    version: str = ""  # that answers
    is_final: bool = False  # another attempt would fail the same way
    is_version_bad: bool = False  # it does not work here, and the old one serves on: other workers should not try it
    program: str = ""  # of the version that answers: the first 16 digits of the SHA-256 of its wheel
    boot_id: str = ""  # of the worker that answers: new for each start of its process
    not_ready: str = ""  # why it should get no requests; empty: it is ready, or does not say


class CancelUpgrade(Message, frozen=True):
    """A version that takes over already is not stopped any more. `success` of the reply: it was stopped."""

    op_id: str = always(str)


UPGRADE_WORKER = call("nodes.{node}.corral.upgrade", UpgradeWorker, UpgradeWorkerReply)
CANCEL_UPGRADE = call("nodes.{node}.corral.upgrade.cancel", CancelUpgrade, DoneReply)
