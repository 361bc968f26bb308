"""Chooses the concrete build of a backend for a node (docs/reference/wire/gallery.md#choosing-a-build). Pure.

Both a choice and a refusal list the tried builds, so that users can see why a GPU machine gets the CPU build.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from corral.contract.hardware import DEFAULT, DISABLED
from corral.gallery.backends.catalogue import AliasGroup, BackendCatalogue
from corral.gallery.backends.compatibility import capability_chain, contract_chain, preference, why_incompatible
from corral.gallery.backends.direct import NO_GALLERY
from corral.gallery.backends.entries import BackendEntry


@dataclass(frozen=True, slots=True)
class TriedBuild:
    """One candidate: its capability key (empty if it was named directly), and the result."""

    key: str
    build: str
    outcome: str

    def __str__(self) -> str:
        where = f"{self.key} → " if self.key else ""
        return f"{where}{self.build}: {self.outcome}"


@dataclass(frozen=True, slots=True)
class ChosenVariant:
    entry: BackendEntry
    reason: str
    tried: tuple[TriedBuild, ...]
    note: str = ""  # for users: why it is not the build for the machine's own hardware


@dataclass(frozen=True, slots=True)
class NoVariant:
    reason: str
    tried: tuple[TriedBuild, ...]


CPU_KEYS = (DEFAULT, "cpu")  # keys of builds for machines without a GPU
_NONE: Mapping[str, str] = MappingProxyType({})
Platforms = Mapping[str, Collection[str]]  # entry id → the os/arch of its source; an absent id: unknown


def choose_variant(
    wanted: BackendEntry | AliasGroup,
    catalogue: BackendCatalogue,
    *,
    capability: str,
    platform: str,
    platforms: Platforms,
    missing: Mapping[str, str] = _NONE,
) -> ChosenVariant | NoVariant:
    """The first build along the capability chain that exists, is compatible and is built for the platform.

    A build with unknown platforms counts as built: the caller looks them up and calls again. `missing`: entry ids
    whose source does not exist, and why.
    """
    candidates = _candidates(wanted, catalogue, capability or DEFAULT, platform)
    tried: list[TriedBuild] = []
    for key, build in candidates:
        if isinstance(build, str):
            tried.append(TriedBuild(key, wanted.capabilities[key] if isinstance(wanted, BackendEntry) else "", build))
        elif why := (
            _why_not_by_name(build, capability) or missing.get(build.id) or _why_not_built(build, platform, platforms)
        ):
            tried.append(TriedBuild(key, build.name, why))
        else:
            reason = _reason(wanted, key, capability or DEFAULT, tried)
            second_best = bool(tried) or (key in CPU_KEYS and (capability or DEFAULT) not in (*CPU_KEYS, DISABLED))
            note = f"{build.name}: {reason}" if second_best else ""
            return ChosenVariant(build, reason, (*tried, TriedBuild(key, build.name, "chosen")), note)
    return NoVariant(_refusal(wanted, capability or DEFAULT, platform, tried), tuple(tried))


def no_build(platform: str) -> str:
    """The reason that a node's row shows."""
    return f"no {platform} build"


def _candidates(
    wanted: BackendEntry | AliasGroup, catalogue: BackendCatalogue, capability: str, platform: str
) -> list[tuple[str, BackendEntry | str]]:
    if isinstance(wanted, AliasGroup):
        # Releases before development builds; `sorted` is stable, so equal ones keep the order of the galleries.
        ranked = sorted(wanted.builds, key=lambda build: (build.is_development(), preference(build.name, capability)))
        return [("", build) for build in ranked]
    if not wanted.is_meta:
        return [("", wanted)]
    # A worker that does not report its platform is LocalAI's and chooses for itself, by LocalAI's rule.
    chain = capability_chain(capability, platform) if platform else contract_chain(capability)
    keys = [key for key in chain if key in wanted.capabilities]
    found: dict[str, tuple[str, BackendEntry | str]] = {}
    for key in keys:  # two keys may name one build, which is tried once
        found.setdefault(wanted.capabilities[key].lower(), (key, catalogue.build_of(wanted, wanted.capabilities[key])))
    return list(found.values())


def _why_not_by_name(build: BackendEntry, capability: str) -> str:
    """A build given by its URI is not checked by its name: a path may contain any word."""
    return "" if build.gallery == NO_GALLERY else why_incompatible(build, capability)


def _why_not_built(build: BackendEntry, platform: str, platforms: Platforms) -> str:
    declared = not build.platforms or platform in build.platforms
    found = build.id not in platforms or platform in platforms[build.id]
    return "" if not platform or (declared and found) else no_build(platform)


def _reason(wanted: BackendEntry | AliasGroup, key: str, capability: str, tried: list[TriedBuild]) -> str:
    missed = f"; {tried[-1]}" if tried else ""
    if isinstance(wanted, AliasGroup):
        return f"best of the builds called {wanted.alias} for {capability}{missed}"
    if not wanted.is_meta:
        return "named directly"
    if key == capability:
        return f"the build for {capability}"
    return f"no build for {capability} itself, {key} is the nearest{missed}"


def _refusal(wanted: BackendEntry | AliasGroup, capability: str, platform: str, tried: list[TriedBuild]) -> str:
    if not tried and isinstance(wanted, BackendEntry):
        return f"{wanted.name} has no build for capability {capability} (there are {', '.join(wanted.capabilities)})"
    if any(step.outcome == no_build(platform) for step in tried):
        return no_build(platform)
    return tried[-1].outcome if len(tried) == 1 else "no build fits: " + "; ".join(map(str, tried))
