"""Settings of the node itself: identity, folders, capacity, and how it joins, reports and leaves."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from corral.contract.budget import parse_budget
from corral.contract.labels import parse_labels
from corral.kit.ca_pin import is_pin, normalize_pin
from corral.kit.process import HOME_DATA, resolve_data
from corral.kit.settings import BadSettings, Seconds, at_least_one, plain_http_url, positive, setting
from corral.kit.signing import BadSignature, Verifier

MAX_NAME_LENGTH = 255


def _http_url(value: str) -> str | None:
    return plain_http_url(value, example="https://controller:8080", secret_flags="the token with --token")


def _ca(value: str) -> str | None:
    if not is_pin(value):
        return (
            None if Path(value).expanduser().is_file() else f"there is no file {value!r}; give a PEM file or sha256:…"
        )
    try:
        normalize_pin(value)
    except ValueError as error:
        return str(error)
    return None


def _node_name(value: str) -> str | None:
    if len(value) > MAX_NAME_LENGTH:
        return f"the name has {len(value)} characters; at most {MAX_NAME_LENGTH} are allowed"
    if value.startswith("-"):
        return f"{value!r} begins with a hyphen; a command would take it for an option"
    if "/" in value or value in (".", ".."):
        return f"{value!r} cannot be part of an address such as /nodes/NAME; use a name without a slash"
    return None if value.isprintable() else f"{value!r} contains control characters"


def _labels(value: str) -> str | None:
    try:
        parse_labels(value)
    except ValueError as error:
        return str(error)
    return None


def _budget(value: str) -> str | None:
    try:
        parse_budget(value)
    except ValueError as error:
        return str(error)
    return None


def _release_key(value: str) -> str | None:
    try:
        Verifier(value)
    except BadSignature:
        return f"{value!r} is no release key; `corral fleet releases` shows it"
    return None


@dataclass(frozen=True)
class NodeSettings:
    """The node and its folders."""

    controller: str = setting(
        "URL of the cluster; empty = the one joined before",
        default="",
        aliases=("LOCALAI_REGISTER_TO",),
        parse=lambda text: text.strip().rstrip("/"),
        check=_http_url,
    )
    token: str = setting(
        "join token; needed once; - = read it from standard input",
        default="",
        secret=True,
        aliases=("LOCALAI_REGISTRATION_TOKEN",),
        parse=str.strip,
    )
    token_file: Path | None = setting("file with the join token", default=None)
    ca: str = setting(
        "CA of the controller: sha256:… as in the join line, or a PEM file; empty = the CAs of the system",
        default="",
        parse=str.strip,
        check=_ca,
    )
    data: Path = setting(
        "folder of identity, credentials and files; root uses /var/lib/corral/worker unless the default exists already",
        default=HOME_DATA / "worker",
    )
    name: str = setting(
        "name of this node; empty = the machine's host name",
        default="",
        aliases=("LOCALAI_NODE_NAME",),
        parse=str.strip,
        check=_node_name,
    )
    labels: str = setting(
        "labels of this node: key=value,key=value", default="", aliases=("LOCALAI_NODE_LABELS",), check=_labels
    )
    max_replicas_per_model: int = setting(
        "replicas of one model this node may hold",
        default=1,
        aliases=("LOCALAI_MAX_REPLICAS_PER_MODEL",),
        check=at_least_one,
    )
    vram_budget: str = setting(
        "how much GPU memory may be used: 80%, 12GB; empty = all",
        default="",
        aliases=("LOCALAI_VRAM_BUDGET",),
        check=_budget,
    )
    models: Path | None = setting(
        "folder of model files; empty = models in the data folder",
        default=None,
        aliases=("LOCALAI_MODELS_PATH", "MODELS_PATH"),
    )
    backends: Path | None = setting(
        "folder of installed backends; empty = backends in the data folder",
        default=None,
        aliases=("LOCALAI_BACKENDS_PATH", "BACKENDS_PATH"),
    )
    system_backends: Path = setting(
        "folder of backends that came with the system; only read",
        default=Path("/var/lib/local-ai/backends"),
        aliases=("LOCALAI_BACKENDS_SYSTEM_PATH",),
        advanced=True,
    )

    def __post_init__(self) -> None:
        if self.ca and self.controller.startswith("http://"):
            raise BadSettings(
                ["ca: the controller's URL is http://, so there is nothing to verify; give the https:// one"]
            )
        object.__setattr__(self, "data", resolve_data(self.data))

    @property
    def models_dir(self) -> Path:
        return self.models or self.data / "models"

    @property
    def backends_dir(self) -> Path:
        return self.backends or self.data / "backends"


@dataclass(frozen=True)
class UpgradeSettings:
    """Whether the controllers may replace the Corral of this worker, and by whose signature."""

    self_upgrade: str = setting(
        "on, or off: whether `corral fleet upgrade` may replace the Corral of this worker",
        default="on",
        parse=lambda text: text.strip().lower(),
        check=lambda value: None if value in ("on", "off") else f"{value!r} is neither on nor off",
    )
    release_key: str = setting(
        "public key of the releases to trust; empty = the one that the controller named at the first registration",
        default="",
        parse=str.strip,
        check=_release_key,
        advanced=True,
    )

    upgrade_timeout_s: Seconds = setting(
        "how long a new version of Corral may take to take over, and again to be ready, before the old one returns",
        default=Seconds(60),
        check=positive,
        advanced=True,
    )

    @property
    def is_allowed(self) -> bool:
        return self.self_upgrade == "on"


@dataclass(frozen=True)
class RegistrationSettings:
    """How often and how long the worker tries to reach its controller."""

    retry_first_s: Seconds = setting(
        "delay before the second attempt to register", default=Seconds(2), check=positive, advanced=True
    )
    retry_cap_s: Seconds = setting(
        "longest delay between attempts to register", default=Seconds(30), check=positive, advanced=True
    )
    approval_poll_s: Seconds = setting(
        "interval at which a node that waits for approval asks the controller",
        default=Seconds(5),
        check=positive,
        advanced=True,
    )
    http_timeout_s: Seconds = setting(
        "timeout of a call to the controller", default=Seconds(10), check=positive, advanced=True
    )

    def __post_init__(self) -> None:
        if self.retry_cap_s < self.retry_first_s:
            raise BadSettings(["retry-cap is shorter than retry-first"])


@dataclass(frozen=True)
class HeartbeatSettings:
    """How often the worker reports to its controller."""

    heartbeat_interval_s: Seconds = setting(
        "interval between heartbeats",
        default=Seconds(10),
        aliases=("LOCALAI_HEARTBEAT_INTERVAL",),
        check=positive,
    )
    http_heartbeat_every: int = setting(
        "every Nth heartbeat also goes over HTTP, which lets the controller respond",
        default=6,
        check=at_least_one,
        advanced=True,
    )
    load_interval_s: Seconds = setting(
        "shortest interval between reports of requests in flight",
        default=Seconds(0.25),
        check=positive,
        advanced=True,
    )


@dataclass(frozen=True)
class ShutdownSettings:
    """How long a worker may take to leave the cluster, or to hand over to a new worker."""

    drain_timeout_s: Seconds = setting(
        "on leaving: how long requests in flight may take to end", default=Seconds(30), check=positive
    )
    leave_timeout_s: Seconds = setting(
        "on leaving: how long draining, stopping and deregistering may take together",
        default=Seconds(90),
        check=positive,
        advanced=True,
    )
    upgrade_drain_s: Seconds = setting(
        "on an upgrade: how long requests in flight may take to end in a process of the old version",
        default=Seconds(600),
        check=positive,
        advanced=True,
    )
    reload_timeout_s: Seconds = setting(
        "on reload: timeout for the new worker to take over", default=Seconds(60), check=positive, advanced=True
    )
    reload_drain_s: Seconds = setting(
        "on reload: how long requests in flight may take to end in the old worker",
        default=Seconds(600),
        check=positive,
        advanced=True,
    )
