"""Galleries, models, their files and their replicas."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from corral.contract.sources import HUB, MODELSCOPE
from corral.gallery.galleries import DEFAULT_GALLERIES, DEFAULT_MODEL_GALLERIES, check_galleries
from corral.kit.humanize import parse_byte_count
from corral.kit.settings import Seconds, not_negative, positive, setting, valid_port


def _url(value: str) -> str | None:
    return None if value.startswith(("http://", "https://")) else f"{value!r} is not a URL"


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
