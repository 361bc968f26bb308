"""Which concrete build of a backend suits a node (docs/reference/wire/gallery.md#choosing-a-build). Pure.

A refusal carries what was tried, one step per candidate: people will ask. So does a choice, because a GPU machine that
gets the CPU build should be able to say why.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from corral.contract.capability import DEFAULT, DISABLED
from corral.gallery.backends.catalogue import AliasGroup, Catalogue
from corral.gallery.backends.compatibility import capability_chain, contract_chain, preference, why_incompatible
from corral.gallery.backends.direct import NOWHERE
from corral.gallery.backends.entries import BackendEntry


@dataclass(frozen=True, slots=True)
class Step:
    """One candidate: the capability key it stands under (empty when it was named directly), and what came of it."""

    key: str
    build: str
    outcome: str

    def __str__(self) -> str:
        where = f"{self.key} → " if self.key else ""
        return f"{where}{self.build}: {self.outcome}"


@dataclass(frozen=True, slots=True)
class Chosen:
    entry: BackendEntry
    reason: str
    tried: tuple[Step, ...]
    note: str = ""  # what people should know: the machine's own kind of build was not to be had


@dataclass(frozen=True, slots=True)
class NoVariant:
    reason: str
    tried: tuple[Step, ...]


PLAIN = (DEFAULT, "cpu")  # keys under which builds for machines without a GPU stand
_NONE: Mapping[str, str] = MappingProxyType({})
Platforms = Mapping[str, Collection[str]]  # entry id → the os/arch its source has; an absent id: nobody knows yet


def choose_variant(
    wanted: BackendEntry | AliasGroup,
    catalogue: Catalogue,
    *,
    capability: str,
    platform: str,
    platforms: Platforms,
    missing: Mapping[str, str] = _NONE,
) -> Chosen | NoVariant:
    """The first build along the chain that exists, can run there and is built for the platform.

    A build whose platforms nobody knows yet counts as built: look them up and ask again. `missing` has the entry ids
    whose source turned out not to exist, and why.
    """
    candidates = _candidates(wanted, catalogue, capability or DEFAULT, platform)
    tried: list[Step] = []
    for key, build in candidates:
        if isinstance(build, str):
            tried.append(Step(key, wanted.capabilities[key] if isinstance(wanted, BackendEntry) else "", build))
        elif why := (
            _why_not_by_name(build, capability) or missing.get(build.id) or _why_not_built(build, platform, platforms)
        ):
            tried.append(Step(key, build.name, why))
        else:
            reason = _reason(wanted, key, capability or DEFAULT, tried)
            second_best = bool(tried) or (key in PLAIN and (capability or DEFAULT) not in (*PLAIN, DISABLED))
            note = f"{build.name}: {reason}" if second_best else ""
            return Chosen(build, reason, (*tried, Step(key, build.name, "chosen")), note)
    return NoVariant(_refusal(wanted, capability or DEFAULT, platform, tried), tuple(tried))


def no_build(platform: str) -> str:
    """The words a node's row shows."""
    return f"no {platform} build"


def _candidates(
    wanted: BackendEntry | AliasGroup, catalogue: Catalogue, capability: str, platform: str
) -> list[tuple[str, BackendEntry | str]]:
    if isinstance(wanted, AliasGroup):
        # Releases before development builds; `sorted` keeps the galleries' order among equals.
        ranked = sorted(wanted.builds, key=lambda build: (build.is_development(), preference(build.name, capability)))
        return [("", build) for build in ranked]
    if not wanted.is_meta:
        return [("", wanted)]
    # A worker that does not say its platform is LocalAI's and chooses for itself, by the contract's rule.
    chain = capability_chain(capability, platform) if platform else contract_chain(capability)
    keys = [key for key in chain if key in wanted.capabilities]
    found: dict[str, tuple[str, BackendEntry | str]] = {}
    for key in keys:  # two keys may name one build; it need not be tried twice
        found.setdefault(wanted.capabilities[key].lower(), (key, catalogue.build_of(wanted, wanted.capabilities[key])))
    return list(found.values())


def _why_not_by_name(build: BackendEntry, capability: str) -> str:
    """What somebody named by its URI is trusted: a path may contain any word."""
    return "" if build.gallery == NOWHERE else why_incompatible(build, capability)


def _why_not_built(build: BackendEntry, platform: str, platforms: Platforms) -> str:
    declared = not build.platforms or platform in build.platforms
    found = build.id not in platforms or platform in platforms[build.id]
    return "" if not platform or (declared and found) else no_build(platform)


def _reason(wanted: BackendEntry | AliasGroup, key: str, capability: str, tried: list[Step]) -> str:
    missed = f"; {tried[-1]}" if tried else ""
    if isinstance(wanted, AliasGroup):
        return f"best of the builds called {wanted.alias} for {capability}{missed}"
    if not wanted.is_meta:
        return "named directly"
    if key == capability:
        return f"the build for {capability}"
    return f"no build for {capability} itself, {key} is the nearest{missed}"


def _refusal(wanted: BackendEntry | AliasGroup, capability: str, platform: str, tried: list[Step]) -> str:
    if not tried and isinstance(wanted, BackendEntry):
        return f"{wanted.name} has no build for capability {capability} (there are {', '.join(wanted.capabilities)})"
    if any(step.outcome == no_build(platform) for step in tried):
        return no_build(platform)
    return tried[-1].outcome if len(tried) == 1 else "no build fits: " + "; ".join(map(str, tried))
