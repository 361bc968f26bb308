"""Compares installed builds with those of loaded bundles. An upgrade would install the bundle's build, so galleries are
not asked about these. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from corral.contract.messages.backends import NodeBackend, NodeDrift, UpgradeInfo
from corral.gallery.backends.resolution import Machine
from corral.gallery.backends.upgrades import NodeInventory
from corral.store.records import TargetBuild

FindVariant = Callable[[str, Machine], TargetBuild | None]


def split_bundled(
    nodes: Sequence[NodeInventory], find: FindVariant
) -> tuple[list[NodeInventory], dict[str, UpgradeInfo]]:
    """The inventories without the builds that a bundle has, and the upgrades of those."""
    rest, found = [], dict[str, UpgradeInfo]()
    for node in nodes:
        own = []
        for backend in node.backends:
            build = find(backend.name, node.machine)
            if build is None or backend.is_system or backend.is_meta:
                own.append(backend)
            elif is_other_build(backend, build):
                found[backend.name] = _joined(found.get(backend.name), node, backend, build)
        rest.append(NodeInventory(node.node_id, node.node_name, node.machine, tuple(own)))
    return rest, found


def is_other_build(installed: NodeBackend, build: TargetBuild) -> bool:
    """Digests decide if both are known, then versions."""
    if installed.digest and build.digest:
        return installed.digest != build.digest
    return bool(installed.version and build.version) and installed.version != build.version


def _joined(known: UpgradeInfo | None, node: NodeInventory, backend: NodeBackend, build: TargetBuild) -> UpgradeInfo:
    """With the nodes whose old build differs from that of the first one."""
    if known is None:
        return UpgradeInfo(backend.name, backend.version, build.version, backend.digest, build.digest)
    if (backend.version, backend.digest) == (known.installed_version, known.installed_digest):
        return known
    drift = NodeDrift(node.node_id, node.node_name, backend.version, backend.digest)
    return msgspec.structs.replace(known, node_drift=(*known.node_drift, drift))
