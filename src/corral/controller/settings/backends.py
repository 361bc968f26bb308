"""Deadlines, retries and intervals of backend operations."""

from __future__ import annotations

from dataclasses import dataclass

from corral.kit.settings import BadSettings, Seconds, positive, setting


@dataclass(frozen=True)
class BackendSettings:
    """Deadlines, retries and intervals of backend operations."""

    backend_install_timeout_s: Seconds = setting(
        "how long to wait for the answer of a LocalAI worker to an install; a later answer still counts",
        default=Seconds(900),
        aliases=("LOCALAI_NATS_BACKEND_INSTALL_TIMEOUT",),
        check=positive,
    )
    backend_upgrade_timeout_s: Seconds = setting(
        "the same for an upgrade",
        default=Seconds(900),
        aliases=("LOCALAI_NATS_BACKEND_UPGRADE_TIMEOUT",),
        check=positive,
    )
    backend_delete_timeout_s: Seconds = setting(
        "the same for a delete", default=Seconds(120), check=positive, advanced=True
    )
    backend_accept_timeout_s: Seconds = setting(
        "timeout for a worker to accept an order", default=Seconds(10), check=positive, advanced=True
    )
    backend_list_timeout_s: Seconds = setting(
        "timeout for a worker to list its backends", default=Seconds(30), check=positive, advanced=True
    )
    retry_first_s: Seconds = setting(
        "delay before a failed step on a node is retried; doubles each time", default=Seconds(30), check=positive
    )
    retry_cap_s: Seconds = setting("longest delay between two attempts", default=Seconds(900), check=positive)
    reconcile_interval_s: Seconds = setting(
        "interval between full comparisons of all nodes with the desired state",
        default=Seconds(30),
        check=positive,
        advanced=True,
    )
    inventory_interval_s: Seconds = setting(
        "interval between inventory requests to LocalAI workers", default=Seconds(60), check=positive, advanced=True
    )
    progress_interval_s: Seconds = setting(
        "minimum interval between progress events", default=Seconds(0.25), check=positive, advanced=True
    )
    progress_write_interval_s: Seconds = setting(
        "minimum interval between writes of progress to the database", default=Seconds(1), check=positive, advanced=True
    )
    accept_budget_s: Seconds = setting(
        "how long a request for an operation waits for galleries and registries; missing answers are added later",
        default=Seconds(5),
        check=positive,
        advanced=True,
    )
    upgrade_check_interval_s: Seconds = setting(
        "interval between checks of the galleries for newer versions",
        default=Seconds(6 * 3600),
        check=positive,
    )
    auto_upgrade: bool = setting(
        "upgrade backends automatically when the check finds a newer version",
        default=False,
        aliases=("LOCALAI_AUTO_UPGRADE_BACKENDS",),
    )

    def __post_init__(self) -> None:
        if self.retry_cap_s < self.retry_first_s:
            raise BadSettings(["--retry-cap must not be shorter than --retry-first"])
