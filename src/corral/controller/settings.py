"""Every setting of `corral controller`, in groups: each subsystem receives its group whole."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from corral.contract.sources import HUB
from corral.gallery.galleries import DEFAULT_GALLERIES, DEFAULT_MODEL_GALLERIES, check_galleries
from corral.kit.checks import a_log_level, a_port, at_least_one, positive
from corral.kit.data_folder import HOME_DATA, resolve_data
from corral.kit.settings import BadSettings, Seconds, group, setting


def _percent(value: int) -> str | None:
    return None if 0 <= value <= 100 else "must be between 0 and 100"


def _port(value: int) -> str | None:
    return None if 0 <= value <= 65535 else "must be between 0 (none) and 65535"


def _store_url(value: str) -> str | None:
    if value.startswith(("sqlite:///", "postgresql://", "postgres://")):
        return None
    return "must be sqlite:///PATH or postgresql://USER@HOST/NAME"


def _url(value: str) -> str | None:
    return None if value.startswith(("http://", "https://")) else f"{value!r} is not a URL"


@dataclass(frozen=True)
class ListenSettings:
    """Where the controller serves its API."""

    socket: Path | None = setting("unix socket to serve on; the local gateway uses it", default=None)
    host: str = setting("address to serve on besides the socket; needs a port", default="127.0.0.1")
    port: int = setting("port to serve on besides the socket; 0 = none", default=0, check=_port)
    tls_cert: Path | None = setting("certificate for host:port (PEM)", default=None)
    tls_key: Path | None = setting("key for host:port (PEM)", default=None)
    public_url: str = setting("URL under which people and workers reach the gateway; printed in join lines", default="")

    def __post_init__(self) -> None:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise BadSettings(["--tls-cert and --tls-key must be given together"])


@dataclass(frozen=True)
class AccessSettings:
    """The first keys, the certificate authority, and web sessions."""

    admin_key_file: Path | None = setting("file with the first admin key; made when absent", default=None)
    gateway_key_file: Path | None = setting("file with the key gateways show; made when absent", default=None)
    ca_cert: Path | None = setting("the cluster's CA certificate; workers get certificates from it", default=None)
    ca_key: Path | None = setting("the cluster's CA key", default=None)
    session_ttl_s: Seconds = setting(
        "a web session unused for so long ends", default=Seconds(12 * 3600), check=positive
    )


@dataclass(frozen=True)
class BusSettings:
    """How the controller, and through it every node, reaches NATS."""

    bus_urls: tuple[str, ...] = setting(
        "where this controller reaches NATS", default=("nats://127.0.0.1:4222",), aliases=("LOCALAI_NATS_URL",)
    )
    bus_public_urls: tuple[str, ...] = setting(
        "where workers reach NATS; `{host}` stands for the host they used to reach us; empty = the same as bus-urls",
        default=(),
    )
    bus_keys: Path | None = setting(
        "folder with the bus keys (operator, account, system, service seeds) of the embedded server", default=None
    )
    bus_account_seed: str = setting(
        "account seed of an external NATS, to mint node credentials",
        default="",
        secret=True,
        aliases=("LOCALAI_NATS_ACCOUNT_SEED",),
    )
    bus_service_jwt: str = setting(
        "this controller's user JWT on an external NATS", default="", secret=True, aliases=("LOCALAI_NATS_SERVICE_JWT",)
    )
    bus_service_seed: str = setting(
        "this controller's user seed on an external NATS",
        default="",
        secret=True,
        aliases=("LOCALAI_NATS_SERVICE_SEED",),
    )
    bus_shared_credentials: bool = setting(
        "use user and password of the bus URL for everyone: no isolation between nodes", default=False
    )
    bus_ca: Path | None = setting("CA of the bus (PEM)", default=None, aliases=("LOCALAI_NATS_TLS_CA",))
    bus_cert: Path | None = setting(
        "client certificate for the bus (PEM)", default=None, aliases=("LOCALAI_NATS_TLS_CERT",), advanced=True
    )
    bus_key: Path | None = setting(
        "client key for the bus (PEM)", default=None, aliases=("LOCALAI_NATS_TLS_KEY",), advanced=True
    )
    bus_credential_ttl_s: Seconds = setting(
        "lifetime of a node's bus credential",
        default=Seconds(3600),
        aliases=("LOCALAI_NATS_WORKER_JWT_TTL",),
        check=positive,
    )


@dataclass(frozen=True)
class RegistrationSettings:
    """Which nodes may register without a decision by an administrator."""

    auto_approve: bool = setting(
        "approve every node that shows a valid token", default=False, aliases=("LOCALAI_AUTO_APPROVE_NODES",)
    )
    pending_limit: int = setting(
        "nodes that may wait for approval at once; more are told to come back later",
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
        "how often processes on LocalAI workers are looked at", default=Seconds(5), check=positive, advanced=True
    )

    def __post_init__(self) -> None:
        if self.compat_localai and not self.registration_token:
            raise BadSettings(["--compat-localai needs --registration-token: LocalAI workers register with it"])


@dataclass(frozen=True)
class HealthSettings:
    """When a node is unhealthy or offline, and what stops a mass outage from being believed."""

    stale_after_s: Seconds = setting("a node silent for so long is offline", default=Seconds(60), check=positive)
    health_interval_s: Seconds = setting("how often health is judged", default=Seconds(5), check=positive)
    guard_share: int = setting(
        "automation takes no more than this share of nodes (percent) offline in one window", default=40, check=_percent
    )
    guard_floor: int = setting("fewer silent nodes than this are no mass outage", default=3, check=at_least_one)
    heartbeat_flush_s: Seconds = setting(
        "heartbeats are written in batches this far apart", default=Seconds(1), check=positive, advanced=True
    )
    ingress_check_interval_s: Seconds = setting(
        "how often a node's ingress is tried", default=Seconds(30), check=positive, advanced=True
    )
    ingress_check_timeout_s: Seconds = setting(
        "how long one try may take", default=Seconds(5), check=positive, advanced=True
    )


@dataclass(frozen=True)
class RuntimeSettings:
    """Leases, the change feed, and how long records are kept."""

    watch_interval_s: Seconds = setting(
        "how often the database is asked for changes made by other controllers",
        default=Seconds(1),
        check=positive,
        advanced=True,
    )
    lease_ttl_s: Seconds = setting(
        "a controller silent for so long loses its leases", default=Seconds(15), check=positive, advanced=True
    )
    keep_receipts_s: Seconds = setting(
        "what became of requests is forgotten after so long", default=Seconds(14 * 86400), check=positive
    )
    keep_operations_s: Seconds = setting(
        "operations that ended so long ago are forgotten", default=Seconds(30 * 86400), check=positive, advanced=True
    )


@dataclass(frozen=True)
class GallerySettings:
    """The indexes of backends and models, and the registries they lead to."""

    galleries: str = setting(
        "galleries besides the built-in one, read when first needed: a JSON list of {name, url, mirrors}; [] = none",
        default=DEFAULT_GALLERIES,
        aliases=("LOCALAI_BACKEND_GALLERIES", "BACKEND_GALLERIES"),
        check=check_galleries,
    )
    model_galleries: str = setting(
        "galleries of models besides the built-in one, read when first needed: a JSON list like that of galleries",
        default=DEFAULT_MODEL_GALLERIES,
        aliases=("LOCALAI_GALLERIES", "GALLERIES"),
        check=check_galleries,
    )
    gallery_folder: Path | None = setting(
        "galleries that are files must be in here; empty = galleries in the data folder", default=None, advanced=True
    )
    gallery_fresh_s: Seconds = setting(
        "a gallery is read again when its copy is older", default=Seconds(3600), check=positive, advanced=True
    )
    gallery_timeout_s: Seconds = setting(
        "how long one place of a gallery may take to send it", default=Seconds(15), check=positive, advanced=True
    )
    insecure_registries: tuple[str, ...] = setting(
        "image registries asked over plain HTTP (host:port); those on this machine always are", default=()
    )


@dataclass(frozen=True)
class ModelSettings:
    """Definitions and schedules that come from files and settings."""

    models_folder: Path | None = setting(
        "YAML files in here define models, as long as they are here; empty = models in the data folder",
        default=None,
        aliases=("LOCALAI_MODELS_PATH",),
    )
    models_folder_interval_s: Seconds = setting(
        "how often that folder is looked at", default=Seconds(2), check=positive, advanced=True
    )
    model_scheduling: str = setting(
        "schedules set at every start, as a JSON list: model_name, min_replicas, max_replicas, replicas, node_selector",
        default="",
        aliases=("LOCALAI_MODEL_SCHEDULING",),
    )
    model_scheduling_config: Path | None = setting(
        "the same from a YAML file", default=None, aliases=("LOCALAI_MODEL_SCHEDULING_CONFIG",)
    )


@dataclass(frozen=True)
class BackendSettings:
    """Deadlines, retries and intervals of backend operations."""

    backend_install_timeout_s: Seconds = setting(
        "how long a worker that answers when it is done may take for an install; longer is no failure",
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
        "how long a worker may take to accept an order", default=Seconds(10), check=positive, advanced=True
    )
    backend_list_timeout_s: Seconds = setting(
        "how long a worker may take to list its backends", default=Seconds(30), check=positive, advanced=True
    )
    retry_first_s: Seconds = setting(
        "what failed on a node is tried again after so long; doubles each time", default=Seconds(30), check=positive
    )
    retry_cap_s: Seconds = setting("longest pause between two tries", default=Seconds(900), check=positive)
    reconcile_interval_s: Seconds = setting(
        "how often every node is compared with what should be, whatever was heard",
        default=Seconds(30),
        check=positive,
        advanced=True,
    )
    inventory_interval_s: Seconds = setting(
        "how often LocalAI workers are asked what they have", default=Seconds(60), check=positive, advanced=True
    )
    progress_interval_s: Seconds = setting(
        "progress is told to followers at most so often", default=Seconds(0.25), check=positive, advanced=True
    )
    progress_write_interval_s: Seconds = setting(
        "and written down at most so often", default=Seconds(1), check=positive, advanced=True
    )
    accept_budget_s: Seconds = setting(
        "how long a request waits for galleries and registries; what they have not said by then is found out later",
        default=Seconds(5),
        check=positive,
        advanced=True,
    )
    upgrade_check_interval_s: Seconds = setting(
        "how often galleries are asked for something newer than what is installed",
        default=Seconds(6 * 3600),
        check=positive,
    )
    auto_upgrade: bool = setting(
        "upgrade by itself what the check finds", default=False, aliases=("LOCALAI_AUTO_UPGRADE_BACKENDS",)
    )

    def __post_init__(self) -> None:
        if self.retry_cap_s < self.retry_first_s:
            raise BadSettings(["--retry-cap must not be shorter than --retry-first"])


@dataclass(frozen=True)
class ReplicaSettings:
    """When models are loaded, scaled and unloaded."""

    idle_unload_s: Seconds = setting(
        "a model unused for so long is unloaded, unless its schedule or definition says otherwise; 0 = never",
        default=Seconds(0),
    )
    load_cooldown_s: Seconds = setting(
        "a model that failed to load is not tried again for so long; doubles each time, up to five minutes",
        default=Seconds(10),
        aliases=("LOCALAI_MODEL_LOAD_FAILURE_COOLDOWN",),
        check=positive,
    )
    disk_check: bool = setting(
        "place no model where its files would fill the disk",
        default=True,
        aliases=("LOCALAI_DISTRIBUTED_DISK_HEADROOM_CHECK",),
    )
    exclusive_groups: bool = setting(
        "models that share a concurrency group are never on one node together; off: they are kept apart where possible",
        default=True,
    )
    shared_models: bool = setting(
        "every node sees the same models folder: files are not fetched",
        default=False,
        aliases=("LOCALAI_DISTRIBUTED_SHARED_MODELS",),
    )
    scale_down_after_s: Seconds = setting(
        "a replica beyond the least a schedule wants, unused for so long, ends", default=Seconds(300), check=positive
    )
    scale_up_after_s: Seconds = setting(
        "when all replicas of a scheduled model are busy for so long, another is started",
        default=Seconds(5),
        check=positive,
    )
    replica_interval_s: Seconds = setting(
        "how often replicas are compared with what should be, whatever was heard",
        default=Seconds(5),
        check=positive,
        advanced=True,
    )
    stray_after_s: Seconds = setting(
        "a process of no model, with nothing to do, is stopped after so long",
        default=Seconds(120),
        check=positive,
        advanced=True,
    )


@dataclass(frozen=True)
class FileSettings:
    """Where model files come from, where the controller keeps them, and how workers fetch them."""

    blob_host: str = setting("address workers fetch model files from", default="127.0.0.1")
    blob_port: int | None = setting(
        "port of the same (8090, or a free one when that is taken); 0 = any free one", default=None, check=a_port
    )
    blob_port_moves: bool = setting(
        "any free port when the one above is taken; workers are told with each order", default=False, advanced=True
    )
    blob_url: str = setting(
        "URL of the same for workers; `{host}` stands for the host by which they reach the cluster, `{port}` for the "
        "port; empty = host and port of the above",
        default="",
        check=lambda value: _url(value) if value else None,
    )
    blob_tls_cert: Path | None = setting("certificate of the same (PEM)", default=None)
    blob_tls_key: Path | None = setting("key of the same (PEM)", default=None)
    blobs: Path | None = setting("folder of fetched model files; empty = blobs in the data folder", default=None)
    file_folders: tuple[str, ...] = setting(
        "folders of this machine that file:// sources of models may lead into, besides models in the data folder",
        default=(),
    )
    huggingface_token: str = setting(
        "token for files on the hub; it never leaves the controller",
        default="",
        secret=True,
        aliases=("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"),
        parse=str.strip,
    )
    huggingface_url: str = setting(
        "where huggingface:// leads", default=HUB, aliases=("HF_ENDPOINT",), check=_url, advanced=True
    )
    download_stall_s: Seconds = setting(
        "a download on which nothing came for so long is begun again where it stopped",
        default=Seconds(60),
        check=positive,
        advanced=True,
    )
    keep_blobs_s: Seconds = setting(
        "files that no model needs are removed after so long", default=Seconds(3600), check=positive, advanced=True
    )


@dataclass(frozen=True)
class ControllerSettings:
    data: Path = setting(
        "folder of the controller's own files; as root /var/lib/corral/controller, unless the default exists",
        default=HOME_DATA / "controller",
    )
    store: str = setting(
        "database: sqlite:///PATH or postgresql://…; empty = corral.db in the data folder",
        default="",
        secret=True,  # a PostgreSQL URL may carry a password
        aliases=("LOCALAI_AUTH_DATABASE_URL",),
        check=lambda value: _store_url(value) if value else None,
    )
    instance_id: str = setting(
        "name of this controller among several; empty = made once and kept in the data folder",
        default="",
        aliases=("LOCALAI_INSTANCE_ID",),
    )
    listen: ListenSettings = group(ListenSettings)
    access: AccessSettings = group(AccessSettings)
    bus: BusSettings = group(BusSettings)
    registration: RegistrationSettings = group(RegistrationSettings)
    localai: LocalAISettings = group(LocalAISettings)
    health: HealthSettings = group(HealthSettings)
    runtime: RuntimeSettings = group(RuntimeSettings)
    gallery: GallerySettings = group(GallerySettings)
    models: ModelSettings = group(ModelSettings)
    files: FileSettings = group(FileSettings)
    backends: BackendSettings = group(BackendSettings)
    replicas: ReplicaSettings = group(ReplicaSettings)
    log_level: str = setting("debug, info, warning or error", default="info", check=a_log_level)
    log_json: bool = setting("log lines as JSON", default=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "data", resolve_data(self.data))

    def store_url(self) -> str:
        return self.store or f"sqlite:///{self.data / 'corral.db'}"
