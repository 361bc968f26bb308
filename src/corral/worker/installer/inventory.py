"""What is installed here, under which names. `read_inventory` looks at the disk; what it returns is pure.

A name may mean a build itself, a meta (which stands for one build), an alias (which several builds share), or something
that came with the system. One that cannot be read is that one's trouble: the others are listed all the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType

from corral.contract.manifest import GRPC, LOCALAI, Manifest
from corral.contract.messages.backends import NodeBackend
from corral.kit.log import get_log
from corral.worker.installer.folder import BackendFolder
from corral.worker.installer.names import choose_build, is_name
from corral.worker.installer.records import RUN_FILE, Metadata, VersionRecord, read_metadata

log = get_log(__name__)


@dataclass(frozen=True)
class InstalledBackend:
    """A build that can be run, from a folder that will not change."""

    name: str
    directory: Path
    manifest: Manifest = LOCALAI
    metadata: Metadata = field(default_factory=Metadata)
    record: VersionRecord | None = None  # None: it came with the system
    previous: tuple[str, ...] = ()  # digests kept beside it that once were current, newest first
    fetched: tuple[str, ...] = ()  # digests kept beside it that never were, newest first

    @property
    def is_system(self) -> bool:
        return self.record is None

    @property
    def digest(self) -> str:
        return self.record.digest if self.record is not None else ""

    @property
    def alias(self) -> str:
        return self.metadata.alias


@dataclass(frozen=True)
class Inventory:
    builds: Mapping[str, InstalledBackend] = field(default_factory=dict)
    metas: Mapping[str, Metadata] = field(default_factory=dict)

    def find(self, name: str, capability: str = "") -> InstalledBackend | None:
        """What a name means here: a build, a meta's build, the best of those that share an alias."""
        if (build := self.builds.get(name)) is not None:
            return build
        if (meta := self.metas.get(name)) is not None and (build := self.builds.get(meta.meta_backend_for)) is not None:
            return build
        sharing = sorted(build.name for build in self.builds.values() if build.alias == name)
        return self.builds[choose_build(capability, sharing)] if sharing else None

    def identity(self, name: str, capability: str = "") -> frozenset[str]:
        """All names under which work on this backend could be asked for, itself included."""
        names = {name}
        build = self.find(name, capability)
        if build is not None:
            names |= {build.name, build.metadata.name, build.alias, *self.metas_of(build.name)}
        return frozenset(names - {""})

    def metas_of(self, build: str) -> frozenset[str]:
        return frozenset(name for name, meta in self.metas.items() if meta.meta_backend_for == build)

    def rows(self, problems: Mapping[str, str] = MappingProxyType({})) -> tuple[NodeBackend, ...]:
        """As the contract lists them: builds and metas, no row for an alias. A meta without its build is none.
        `problems`: by build, why nothing of it can run now."""
        rows = [_build_row(build, problems.get(build.name, "")) for build in self.builds.values()]
        rows += [_meta_row(name, meta) for name, meta in self.metas.items() if meta.meta_backend_for in self.builds]
        return tuple(sorted(rows, key=lambda row: row.name))


def read_inventory(backends: Path, system: Path | None = None) -> Inventory:
    builds: dict[str, InstalledBackend] = {}
    metas: dict[str, Metadata] = {}
    for path in _folders(system):
        if (path / RUN_FILE).is_file():
            builds[path.name] = InstalledBackend(path.name, path)
    for path in _folders(backends):
        folder = BackendFolder(path)
        if (build := read_build(folder)) is not None:
            builds[path.name] = build
        elif not folder.exists() and (meta := read_metadata(path)) is not None and meta.meta_backend_for:
            metas[path.name] = meta
    return Inventory(builds, metas)


def read_build(folder: BackendFolder) -> InstalledBackend | None:
    """The current version, if there is a whole one."""
    record = folder.current()
    if record is None:
        return None
    others = [other for other in folder.records().values() if other.id != record.id]
    kept = sorted(others, key=lambda other: (other.id == record.replaces, other.made_at), reverse=True)
    build = build_of(folder, record)
    return replace(
        build,
        previous=_digests(other for other in kept if other.activated_at),
        fetched=_digests(other for other in kept if not other.activated_at),
    )


def build_of(folder: BackendFolder, record: VersionRecord) -> InstalledBackend:
    directory = folder.directory(record.id).resolve()
    return InstalledBackend(folder.name, directory, record.how_to_run, record.metadata, record)


def _digests(records: Iterable[VersionRecord]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(record.digest for record in records if record.digest))


def find_loose_program(name: str, *roots: Path | None) -> InstalledBackend | None:
    """A program without any folder around it, or alone in one of its own name
    (docs/reference/wire/backends.md#install-without-accept, step 4)."""
    if not is_name(name):
        return None
    for root in roots:
        for path in (root / name, root / name / name) if root is not None else ():
            if path.is_file():
                manifest = Manifest(protocol=GRPC, command=(str(path), "--addr", "{host}:{port}"))
                return InstalledBackend(name, path.parent, manifest)
    return None


def _folders(root: Path | None) -> list[Path]:
    try:
        found = sorted(root.iterdir()) if root is not None else []
    except OSError:
        return []
    return [path for path in found if is_name(path.name) and path.is_dir()]


def _build_row(build: InstalledBackend, problem: str) -> NodeBackend:
    metadata = build.metadata
    return NodeBackend(
        name=build.name,
        is_system=build.is_system,
        is_meta=False,
        installed_at=metadata.installed_at,
        gallery_url=metadata.gallery_url,
        version=metadata.version,
        uri=metadata.uri,
        digest=build.digest,
        alias=metadata.alias,
        previous=build.previous,
        fetched=build.fetched,
        problem=problem,
    )


def _meta_row(name: str, meta: Metadata) -> NodeBackend:
    return NodeBackend(
        name=name,
        is_system=False,
        is_meta=True,
        installed_at=meta.installed_at,
        gallery_url=meta.gallery_url,
        version=meta.version,
        meta_backend_for=meta.meta_backend_for,
    )
