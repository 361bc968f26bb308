"""Which nodes may join, when they are offline, and how long the controller keeps what it knows."""

from __future__ import annotations

from dataclasses import dataclass

from corral.kit.settings import BadSettings, Seconds, at_least_one, positive, setting


def _percent(value: int) -> str | None:
    return None if 0 <= value <= 100 else "must be between 0 and 100"


@dataclass(frozen=True)
class RegistrationSettings:
    """Which nodes may register without a decision by an administrator."""

    auto_approve: bool = setting(
        "approve every node with a valid token", default=False, aliases=("LOCALAI_AUTO_APPROVE_NODES",)
    )
    pending_limit: int = setting(
        "maximum number of pending nodes; further nodes are refused and retry later",
        default=1000,
        check=at_least_one,
        advanced=True,
    )


@dataclass(frozen=True)
class LocalAISettings:
    """Whether LocalAI workers may join, and how the controller watches their processes."""

    compat_localai: bool = setting("let LocalAI workers join with the shared registration token", default=False)
    registration_token: str = setting(
        "the shared token of LocalAI workers; only with compat-localai",
        default="",
        secret=True,
        aliases=("LOCALAI_REGISTRATION_TOKEN",),
    )
    peer_check_interval_s: Seconds = setting(
        "interval between checks of processes on LocalAI workers", default=Seconds(5), check=positive, advanced=True
    )

    def __post_init__(self) -> None:
        if self.compat_localai and not self.registration_token:
            raise BadSettings(["--compat-localai needs --registration-token: LocalAI workers register with it"])


@dataclass(frozen=True)
class HealthSettings:
    """When a node is unhealthy or offline, and what stops a mass outage from being believed."""

    stale_after_s: Seconds = setting(
        "a node without heartbeat for this time is offline", default=Seconds(60), check=positive
    )
    health_interval_s: Seconds = setting("interval between health evaluations", default=Seconds(5), check=positive)
    guard_share: int = setting(
        "the controller marks at most this share of nodes (percent) offline in one window", default=40, check=_percent
    )
    guard_floor: int = setting(
        "fewer nodes without heartbeat than this do not count as a mass outage", default=3, check=at_least_one
    )
    heartbeat_flush_s: Seconds = setting(
        "interval between writes of heartbeats to the database", default=Seconds(1), check=positive, advanced=True
    )
    ingress_check_interval_s: Seconds = setting(
        "interval between checks of the ingress of a node", default=Seconds(30), check=positive, advanced=True
    )
    ingress_check_timeout_s: Seconds = setting(
        "timeout of one check", default=Seconds(5), check=positive, advanced=True
    )


@dataclass(frozen=True)
class RuntimeSettings:
    """Leases, the change feed, and how long records are kept."""

    watch_interval_s: Seconds = setting(
        "interval between reads of changes made by other controllers",
        default=Seconds(1),
        check=positive,
        advanced=True,
    )
    lease_ttl_s: Seconds = setting(
        "a controller that does not renew its leases for this time loses them",
        default=Seconds(15),
        check=positive,
        advanced=True,
    )
    keep_receipts_s: Seconds = setting(
        "receipts of requests are deleted after this time", default=Seconds(14 * 86400), check=positive
    )
    keep_operations_s: Seconds = setting(
        "operations are deleted this long after their end", default=Seconds(30 * 86400), check=positive, advanced=True
    )
