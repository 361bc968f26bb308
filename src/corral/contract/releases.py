"""Releases of Corral that a fleet installs by itself: the signed order, and how a release key follows another one
(docs/adr/0048-a-fleet-upgrades-itself.md).

Each signature begins with a domain of its own: no other text that Corral signs can be taken for a release.
"""

from __future__ import annotations

from corral.contract.codec import Message, always

RELEASE_DOMAIN = b"corral release 1\n"
KEY_DOMAIN = b"corral release key 1\n"
MAX_WHEEL_BYTES = 32 << 20
MAX_SIGNED_LENGTH = 2048


class ReleaseOrder(Message, frozen=True):
    """What the release key signs. The wheel contains the hashes of its dependencies, so they are signed too."""

    counter: int = always(int)  # higher than that of every earlier release: a worker refuses a lower one
    version: str = always(str)
    sha256: str = always(str)  # of the wheel
    size_bytes: int = always(int)


class ReleaseKeyChange(Message, frozen=True):
    """What a release key signs about its successor."""

    previous: str = always(str)  # public keys
    next: str = always(str)


class ReleaseView(Message, frozen=True):
    counter: int = always(int)
    version: str = always(str)
    sha256: str = always(str)
    size_bytes: int = always(int)
    signed: str = always(str)  # the order with its signature
    created_at: str = always(str)
    created_by: str = ""


class ReleaseKeyView(Message, frozen=True):
    public_key: str = always(str)
    is_held: bool = always(bool)  # the controllers have the private key; False: it is kept elsewhere
    next_counter: int = always(int)  # the lowest counter that workers accept


class ReleaseList(Message, frozen=True):
    key: ReleaseKeyView
    releases: tuple[ReleaseView, ...] = always(tuple)  # the newest first


class AddRelease(Message, frozen=True):
    """A wheel that was uploaded becomes a release."""

    sha256: str = always(str)
    signed: str = ""  # empty: the controller signs, with the key that it holds


class ChangeReleaseKey(Message, frozen=True):
    public_key: str = always(str)  # empty with `is_new`
    proof: str = ""  # a `ReleaseKeyChange`, signed by the key before; empty: the controller signs it
    is_lost: bool = False  # the key before cannot sign any more: workers do not follow by themselves
    is_new: bool = False  # the controllers make a key and keep it


class UpgradeFleet(Message, frozen=True):
    """At most one of `counter`, `version` and `sha256` names the release; without them it is the version that the
    controllers run. A version or a wheel that is not the newest release is signed again, with a higher counter, if the
    controllers hold the key. A dry run signs nothing; its `sha256` may be that of a wheel that was only uploaded."""

    counter: int = 0
    version: str = ""
    sha256: str = ""
    node: str = ""
    selector: str = ""
    max_parallel: str = ""
    dry_run: bool = False
    soak: str = ""  # 5m, or 200 for a number of requests
    max_errors: str = ""
    min_requests: int = 0


class FleetUpgradeNode(Message, frozen=True):
    node: str = always(str)
    version: str = always(str)  # that it runs now
    action: str = always(str)  # upgrade, none, skip, wait
    hardware_class: str = ""
    is_canary: bool = False
    reason: str = ""
    returns_to: str = ""  # the version to which it is returned by itself; empty: the controllers have no wheel of it


class FleetUpgradeService(Message, frozen=True):
    """A controller or gateway, which a person upgrades."""

    role: str = always(str)
    name: str = always(str)
    version: str = always(str)
    command: str = always(str)
    reason: str = always(str)


class FleetUpgradePlan(Message, frozen=True):
    counter: int = always(int)
    version: str = always(str)
    sha256: str = always(str)
    size_bytes: int = always(int)
    max_parallel: str = always(str)
    nodes: tuple[FleetUpgradeNode, ...] = always(tuple)
    services: tuple[FleetUpgradeService, ...] = ()
    operation: str = ""  # empty: a dry run
    soak: str = ""
