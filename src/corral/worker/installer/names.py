"""Names of backends: which are allowed, and which build a shared name means. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence

from corral.kit.errors import Invalid

# What LocalAI leaves beside its folders when it is interrupted.
LEFTOVERS = (".install-tmp", ".install-backup", ".upgrade-tmp", ".backup")

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+@-]{0,127}\Z")

# Which of several builds an alias means: docs/reference/wire/gallery.md#builds-with-one-alias
_TOKENS = (
    ("nvidia", ("cuda", "vulkan", "cpu")),
    ("amd", ("rocm", "hip", "vulkan", "cpu")),
    ("intel", ("sycl", "intel", "cpu")),
    ("metal", ("metal", "cpu")),
    ("darwin-x86", ("darwin-x86", "cpu")),
    ("vulkan", ("vulkan", "cpu")),
    ("", ("cpu",)),
)


def check_name(name: str) -> str:
    """The name itself, or Invalid. It becomes a folder's name, so nothing else may pass."""
    if not _NAME.match(name) or name.endswith(LEFTOVERS):
        raise Invalid(
            f"{name[:140]!r} cannot name a backend: letters, digits and . _ + @ - are allowed, at most 128, "
            f"beginning with a letter or digit, not ending in {', '.join(LEFTOVERS)}"
        )
    return name


def is_name(name: str) -> bool:
    return _NAME.match(name) is not None and not name.endswith(LEFTOVERS)


def choose_build(capability: str, builds: Sequence[str]) -> str:
    """Which of several builds that share an alias fits this machine best; the first where none stands out."""
    tokens = next(tokens for prefix, tokens in _TOKENS if capability.startswith(prefix))
    for token in tokens:
        for build in builds:
            if token in build:
                return build
    return builds[0]
