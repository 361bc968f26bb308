"""Settings of the gateway about where a request goes: how long it waits, how many replicas it tries, prefix cache."""

from __future__ import annotations

from dataclasses import dataclass

from corral.kit.settings import Seconds, not_negative, positive, setting


@dataclass(frozen=True)
class RoutingSettings:
    load_wait_s: Seconds = setting(
        "how long a request waits for a model to load, unless the model overrides this; 0 = without limit",
        default=Seconds(60),
        check=not_negative,
        aliases=("LOCALAI_MODEL_LOAD_WAIT",),
    )
    load_poll_s: Seconds = setting(
        "duration of one long-poll request to the controller about a load",
        default=Seconds(20),
        check=positive,
        advanced=True,
    )
    queue_wait_s: Seconds = setting(
        "how long a request waits for a replica with a free slot", default=Seconds(60), check=positive
    )
    queue_limit: int = setting(
        "maximum number of queued requests for one model, unless the model overrides this",
        default=1000,
        check=positive,
    )
    tries: int = setting(
        "maximum number of replicas that a request tries when replicas cannot be reached",
        default=4,
        check=positive,
        advanced=True,
    )
    eject_s: Seconds = setting(
        "how long a replica that could not be reached gets no requests at first",
        default=Seconds(1),
        check=positive,
        advanced=True,
    )
    eject_cap_s: Seconds = setting(
        "longest such time; it doubles with each failure", default=Seconds(30), check=positive, advanced=True
    )
    prefix_cache: bool = setting(
        "send prompts with the same prefix to the same replica, unless the model overrides this",
        default=True,
        aliases=("LOCALAI_DISTRIBUTED_PREFIX_CACHE",),
    )
    prefix_cache_ttl_s: Seconds = setting(
        "how long a prefix is remembered",
        default=Seconds(300),
        check=positive,
        aliases=("LOCALAI_DISTRIBUTED_PREFIX_CACHE_TTL",),
        advanced=True,
    )
    prefix_half_life_s: Seconds = setting(
        "half-life of the weight of a prefix in the cache of a replica",
        default=Seconds(120),
        check=positive,
        advanced=True,
    )
    expose_node_header: bool = setting(
        "name the node that answered, in X-Corral-Node and X-LocalAI-Node",
        default=False,
        aliases=("LOCALAI_EXPOSE_NODE_HEADER",),
    )
    retry_after_s: Seconds = setting(
        "Retry-After for clients when the controller or a replica cannot be reached",
        default=Seconds(2),
        check=positive,
        advanced=True,
    )
