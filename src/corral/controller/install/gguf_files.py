"""The GGUF files of a repository: which belong together, and how they are quantised. Pure.

A model in parts (`x-00001-of-00003.gguf`) is one choice; a projector (`mmproj-x.gguf`) belongs to every choice.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from corral.kit.errors import Invalid

_PART = re.compile(r"-(\d{5})-of-(\d{5})\Z")
_QUANT = re.compile(
    r"(?:\A|[-._/ ])((?:UD-)?(?:I?Q[1-8](?:_[A-Z0-9]+)*|TQ[12]_0|MXFP4(?:_MOE)?|NVFP4|BF16|F16|FP16|F32|FP32))"
    r"(?=\Z|[-._/ ])",
    re.IGNORECASE,
)
MAX_PARTS = 1000
# Almost as good as the original at half of its size or less: what is larger is only for those who ask for it.
BEST = "Q8_0"
# For a node without an accelerator, on which the speed is the memory's: more bits make every answer slower.
BEST_IN_RAM = "Q4_K_M"
# By quality, best first; what is not listed stands by its number of bits.
_ORDER = (
    *("F32", "BF16", "F16", "Q8_K_XL", "Q8_0", "Q6_K_XL", "Q6_K_L", "Q6_K", "Q5_K_XL", "Q5_K_L", "Q5_K_M", "Q5_K_S"),
    *(
        "Q5_1",
        "Q5_0",
        "Q4_K_XL",
        "Q4_K_L",
        "Q4_K_M",
        "MXFP4_MOE",
        "MXFP4",
        "Q4_K_S",
        "IQ4_NL",
        "IQ4_XS",
        "Q4_1",
        "Q4_0",
    ),
    *("Q3_K_XL", "Q3_K_L", "Q3_K_M", "IQ3_M", "IQ3_S", "Q3_K_S", "IQ3_XS", "IQ3_XXS", "Q2_K_XL", "Q2_K_L", "Q2_K"),
    *("IQ2_M", "IQ2_S", "IQ2_XS", "IQ2_XXS", "IQ1_M", "IQ1_S"),
)


@dataclass(frozen=True)
class SourceFile:
    """A file of a model, where it comes from."""

    path: str
    uri: str
    size_bytes: int = 0  # 0: unknown
    sha256: str = ""  # bare hex


@dataclass(frozen=True)
class QuantChoice:
    """One quantisation: its parts in order."""

    quant: str  # upper case; empty: the name does not say
    files: tuple[SourceFile, ...]
    projector: SourceFile | None = None

    @property
    def size_bytes(self) -> int:
        """Of all its files; 0 when one is unknown."""
        sizes = [file.size_bytes for file in self.all_files]
        return sum(sizes) if all(sizes) else 0

    @property
    def all_files(self) -> tuple[SourceFile, ...]:
        return (*self.files, *([self.projector] if self.projector is not None else []))


def is_gguf_path(path: str) -> bool:
    return path.lower().endswith(".gguf")


def is_projector(path: str) -> bool:
    return is_gguf_path(path) and "mmproj" in PurePosixPath(path).name.lower()


def quant_of(path: str) -> str:
    """Upper case; empty: the name does not say. The last one counts: `Q4-bot.Q8_0.gguf`; else that of the folder."""
    name = _stem(PurePosixPath(path).name)
    found = _QUANT.findall(name) or _QUANT.findall(str(PurePosixPath(path).parent))
    return found[-1].upper().replace("FP16", "F16").replace("FP32", "F32") if found else ""


def plain_name(path: str) -> str:
    """The name of the file without its ending, the number of its part and its quantisation."""
    stem = _stem(PurePosixPath(path).name)
    found = list(_QUANT.finditer(stem))
    return stem[: found[-1].start()] + stem[found[-1].end() :] if found and found[-1].start() else stem


def rank(quant: str) -> tuple[int, float]:
    """Smaller is better. Of those not listed, more bits are better; without a name nobody can say."""
    plain = quant.upper().removeprefix("UD-")
    if plain in _ORDER:
        return 0, _ORDER.index(plain)
    digits = re.search(r"\d+", plain)
    return 1, -float(digits[0]) if digits else 0.0


def is_at_most(quant: str, limit: str) -> bool:
    """Whether it has no more bits than `limit`. One without a name counts as it is: there is nothing else to have."""
    return not quant or rank(quant) >= rank(limit)


def group_choices(files: Iterable[SourceFile]) -> list[QuantChoice]:
    """The choices of a repository, best first. Raises Invalid for a model of which parts are missing and nothing else
    is there."""
    found = [file for file in files if is_gguf_path(file.path)]
    projectors = [file for file in found if is_projector(file.path)]
    projector = _best_projector(projectors)
    groups: dict[str, list[SourceFile]] = {}
    for file in found:
        if file not in projectors:
            groups.setdefault(_whole_path(file.path), []).append(file)
    complete = {key: parts for key, parts in groups.items() if not _missing_parts(parts)}
    if groups and not complete:
        key, parts = next(iter(groups.items()))
        raise Invalid(f"{key} is incomplete: {_missing_parts(parts)}")
    choices = [
        QuantChoice(quant_of(parts[0].path), tuple(sorted(parts, key=lambda file: file.path)), projector)
        for parts in complete.values()
    ]
    return sorted(choices, key=lambda choice: (rank(choice.quant), choice.files[0].path))


def choose_file(files: Sequence[SourceFile], path: str) -> QuantChoice | None:
    """The choice that contains the file; None: there is none."""
    projector = _best_projector([file for file in files if is_projector(file.path)])
    for choice in group_choices([file for file in files if _whole_path(file.path) == _whole_path(path)]):
        if any(file.path == path for file in choice.files):
            return QuantChoice(choice.quant, choice.files, projector)
    return None


def _best_projector(projectors: Sequence[SourceFile]) -> SourceFile | None:
    """Half precision first: projectors are small, and engines are tested with it."""
    order = {"F16": 0, "BF16": 1, "Q8_0": 2, "F32": 3}
    return min(projectors, key=lambda file: (order.get(quant_of(file.path), 4), file.path), default=None)


def _stem(name: str) -> str:
    return _PART.sub("", re.sub(r"\.gguf\Z", "", name, flags=re.IGNORECASE))


def _whole_path(path: str) -> str:
    """The same for all parts of a model."""
    at = PurePosixPath(path)
    return str(at.with_name(_stem(at.name) + ".gguf"))


def _missing_parts(parts: Sequence[SourceFile]) -> str:
    """Empty: all are there."""
    numbers = [_PART.search(re.sub(r"\.gguf\Z", "", file.path, flags=re.IGNORECASE)) for file in parts]
    if not any(numbers):
        return ""
    total = max(int(found[2]) for found in numbers if found)
    there = {int(found[1]) for found in numbers if found}
    if total > MAX_PARTS:
        return f"{total} parts are too many"
    missing = [number for number in range(1, total + 1) if number not in there]
    return f"part {missing[0]} of {total} is missing" if missing else ""
