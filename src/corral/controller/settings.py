"""Every setting of `corral controller`, in groups: each subsystem receives its group whole."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from corral.blobs.storage_settings import StorageSettings
from corral.contract.sources import HUB, MODELSCOPE
from corral.gallery.galleries import DEFAULT_GALLERIES, DEFAULT_MODEL_GALLERIES, check_galleries
from corral.kit.humanize import parse_byte_count
from corral.kit.process import HOME_DATA, resolve_data
from corral.kit.settings import (
    BadSettings,
    Seconds,
    at_least_one,
    group,
    not_negative,
    positive,
    setting,
    valid_log_level,
    valid_port,
)


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

    socket: Path | None = setting("Unix socket to listen on; the gateway of this machine uses it", default=None)
    host: str = setting("address to listen on in addition to the socket; needs --port", default="127.0.0.1")
    port: int = setting("port to listen on in addition to the socket; 0 = none", default=0, check=_port)
    tls_cert: Path | None = setting("certificate for host:port (PEM)", default=None)
    tls_key: Path | None = setting("key for host:port (PEM)", default=None)
    public_url: str = setting("URL under which users and workers reach the gateway; part of join commands", default="")

    def __post_init__(self) -> None:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise BadSettings(["--tls-cert and --tls-key must be given together"])


@dataclass(frozen=True)
class AccessSettings:
    """The first keys, the certificate authority, and web sessions."""

    admin_key_file: Path | None = setting("file with the first admin key; created if missing", default=None)
    gateway_key_file: Path | None = setting("file with the key of the gateways; created if missing", default=None)
    ca_cert: Path | None = setting("CA certificate of the fleet; it signs the certificates of workers", default=None)
    ca_key: Path | None = setting("CA key of the fleet", default=None)
    gateway_cert: Path | None = setting(
        "certificate of the gateways for its host names, if another CA issued it (PEM, with its chain); join lines of "
        "these names pin what verifies it",
        default=None,
    )
    session_ttl_s: Seconds = setting(
        "a web session ends after this time without use", default=Seconds(12 * 3600), check=positive
    )


@dataclass(frozen=True)
class BusSettings:
    """How the controller, and through it every node, reaches NATS."""

    bus_urls: tuple[str, ...] = setting(
        "URLs of NATS for this controller", default=("nats://127.0.0.1:4222",), aliases=("LOCALAI_NATS_URL",)
    )
    bus_public_urls: tuple[str, ...] = setting(
        "URLs of NATS for workers; `{host}` becomes the host with which a worker reached the fleet; empty = --bus-urls",
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
        "use the user and password of the bus URL for all nodes: no isolation between nodes", default=False
    )
    bus_ca: Path | None = setting("CA of the bus (PEM)", default=None, aliases=("LOCALAI_NATS_TLS_CA",))
    bus_cert: Path | None = setting(
        "client certificate for the bus (PEM)", default=None, aliases=("LOCALAI_NATS_TLS_CERT",), advanced=True
    )
    bus_key: Path | None = setting(
        "client key for the bus (PEM)", default=None, aliases=("LOCALAI_NATS_TLS_KEY",), advanced=True
    )
    bus_credential_ttl_s: Seconds = setting(
        "lifetime of the bus credential of a node",
        default=Seconds(3600),
        aliases=("LOCALAI_NATS_WORKER_JWT_TTL",),
        check=positive,
    )


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
        "folder for galleries that are files; empty = galleries in the data folder", default=None, advanced=True
    )
    gallery_fresh_s: Seconds = setting(
        "a gallery is read again when its copy is older than this", default=Seconds(3600), check=positive, advanced=True
    )
    gallery_timeout_s: Seconds = setting(
        "timeout for reading a gallery from one of its sources", default=Seconds(15), check=positive, advanced=True
    )
    insecure_registries: tuple[str, ...] = setting(
        "image registries to use over plain HTTP (host:port); registries on this machine always are", default=()
    )


@dataclass(frozen=True)
class ModelSettings:
    """Definitions and schedules that come from files and settings."""

    models_folder: Path | None = setting(
        "folder whose YAML files define models; empty = models in the data folder",
        default=None,
        aliases=("LOCALAI_MODELS_PATH",),
    )
    models_folder_interval_s: Seconds = setting(
        "interval between reads of that folder", default=Seconds(2), check=positive, advanced=True
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


@dataclass(frozen=True)
class ReplicaSettings:
    """When models are loaded, scaled and unloaded."""

    idle_unload_s: Seconds = setting(
        "unload a model after this time without requests, unless its schedule or definition overrides this; 0 = never",
        default=Seconds(0),
    )
    load_cooldown_s: Seconds = setting(
        "delay before a model that failed to load is loaded again; doubles each time, up to five minutes",
        default=Seconds(10),
        aliases=("LOCALAI_MODEL_LOAD_FAILURE_COOLDOWN",),
        check=positive,
    )
    disk_check: bool = setting(
        "do not place a model on a node whose disk its files would fill",
        default=True,
        aliases=("LOCALAI_DISTRIBUTED_DISK_HEADROOM_CHECK",),
    )
    exclusive_groups: bool = setting(
        "never place models of one concurrency group on the same node; off: avoid it where possible",
        default=True,
    )
    shared_models: bool = setting(
        "controller and nodes share one models folder: files are used where they lie, nothing is fetched or written",
        default=False,
        aliases=("LOCALAI_DISTRIBUTED_SHARED_MODELS",),
    )
    scale_down_after_s: Seconds = setting(
        "a replica above the minimum of its schedule is stopped after this time without requests",
        default=Seconds(300),
        check=positive,
    )
    scale_up_after_s: Seconds = setting(
        "another replica is started when all replicas of a scheduled model are busy for this time",
        default=Seconds(5),
        check=positive,
    )
    replica_interval_s: Seconds = setting(
        "interval between full comparisons of replicas with the desired state",
        default=Seconds(5),
        check=positive,
        advanced=True,
    )
    stray_after_s: Seconds = setting(
        "an idle process that belongs to no model is stopped after this time",
        default=Seconds(120),
        check=positive,
        advanced=True,
    )


MODEL_HUBS = ("huggingface", "modelscope")


@dataclass(frozen=True)
class FileSettings:
    """Where model files come from, where the controller keeps them, and how workers fetch them."""

    blob_host: str = setting("address from which workers fetch model files", default="127.0.0.1")
    blob_port: int | None = setting(
        "port of the model files (default: 8090, or a free port if that is taken); 0 = any free port",
        default=None,
        check=valid_port,
    )
    blob_port_moves: bool = setting(
        "use any free port if --blob-port is taken; workers learn the port with each order",
        default=False,
        advanced=True,
    )
    blob_url: str = setting(
        "URL of the model files for workers; `{host}` becomes the host with which a worker reaches the fleet, `{port}` "
        "the port; empty = --blob-host and --blob-port",
        default="",
        check=lambda value: _url(value) if value else None,
    )
    blob_tls_cert: Path | None = setting("certificate of the model file server (PEM)", default=None)
    blob_tls_key: Path | None = setting("key of the model file server (PEM)", default=None)
    blobs: Path | None = setting("folder of fetched model files; empty = blobs in the data folder", default=None)
    file_folders: tuple[str, ...] = setting(
        "folders of this machine that file:// sources of models may use, in addition to models in the data folder",
        default=(),
    )
    huggingface_token: str = setting(
        "token for files on the Hugging Face hub; the controller does not pass it on",
        default="",
        secret=True,
        aliases=("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"),
        parse=str.strip,
    )
    huggingface_url: str = setting(
        "URL for huggingface:// sources", default=HUB, aliases=("HF_ENDPOINT",), check=_url, advanced=True
    )
    model_hub: str = setting(
        "hub of hf:// and huggingface:// sources: huggingface, or modelscope for repositories of the same names there",
        default=MODEL_HUBS[0],
        check=lambda value: None if value in MODEL_HUBS else f"{value!r} is none of {', '.join(MODEL_HUBS)}",
    )
    modelscope_token: str = setting(
        "token for files on ModelScope; the controller does not pass it on",
        default="",
        secret=True,
        aliases=("MODELSCOPE_API_TOKEN",),
        parse=str.strip,
    )
    modelscope_url: str = setting("URL for modelscope:// sources", default=MODELSCOPE, check=_url, advanced=True)
    download_stall_s: Seconds = setting(
        "a download without data for this time is restarted where it stopped",
        default=Seconds(60),
        check=positive,
        advanced=True,
    )
    upload_limit_bytes: int = setting(
        "largest file that `corral models install FILE` may upload", default=200 << 30, check=positive
    )
    keep_blobs_s: Seconds = setting(
        "files that no model needs, and uploads that nobody continues, are deleted after this time",
        default=Seconds(3600),
        check=positive,
        advanced=True,
    )
    cache_limit: float = setting(
        "disk space for model files, such as 200GiB: above it, the files not requested for longest are removed and "
        "fetched again when a node needs them; files in use and uploaded files stay; 0 = as much as the disk holds",
        default=0.0,
        parse=parse_byte_count,
        check=not_negative,
    )
    artifacts_limit_bytes: int = setting(
        "disk space for layers, archives and wheels of backends that workers fetch through the controller; the ones "
        "not requested for longest are deleted, those in use are not",
        default=20 << 30,
        check=lambda value: None if value >= 0 else "must not be negative",
    )


@dataclass(frozen=True)
class ControllerSettings:
    data: Path = setting(
        "data folder of the controller; root uses /var/lib/corral/controller unless the default exists already",
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
        "id of this controller; empty = generated once and kept in the data folder",
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
    storage: StorageSettings = group(StorageSettings)
    backends: BackendSettings = group(BackendSettings)
    replicas: ReplicaSettings = group(ReplicaSettings)
    log_level: str = setting("debug, info, warning or error", default="info", check=valid_log_level)
    log_json: bool = setting("log lines as JSON", default=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "data", resolve_data(self.data))

    def store_url(self) -> str:
        return self.store or f"sqlite:///{self.data / 'corral.db'}"
