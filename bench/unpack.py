"""Unpacking an image's layers: ours beside `tar x`, on the same layers, in turn, as ratios.

    scripts/bench unpack [--rounds N] [--files N] [--megabytes N]

Two shapes: many small files (a Python backend's environment) and few large ones (an engine with its libraries), each as
gzip layers and as plain tar. Ours checks every entry, applies whiteouts and bounds; `tar x` trusts what it is given.
Target: at least 0.35 × `tar x` (docs/explanation/design.md#targets). Both write to the same disk; the median of the
rounds counts.
"""

from __future__ import annotations

import argparse
import gzip
import io
import os
import random
import shutil
import statistics
import subprocess
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from corral.blobs.archives.decompress import decompress_blocks
from corral.blobs.archives.entries import Bounds, UnpackCounter
from corral.blobs.archives.tar import read_tar
from corral.blobs.archives.unpack import Unpacker
from corral.kit.humanize import format_bytes

TARGET = 0.35
SOURCE_LINE = b"def answer(question: str) -> str:\n    return question.upper()\n"


def small_files(count: int, roll: random.Random) -> Iterator[tuple[str, bytes]]:
    """As site-packages looks: most files a few kilobytes of text."""
    for number in range(count):
        size = roll.choice((0, 300, 2_000, 6_000, 12_000, 40_000))
        yield f"venv/lib/site-packages/pkg{number // 50}/m{number}.py", (SOURCE_LINE * (size // 60 + 1))[:size]


def large_files(megabytes: int, roll: random.Random) -> Iterator[tuple[str, bytes]]:
    """As an engine looks: libraries of 20 MiB, a third of them hardly compressible."""
    parts = (roll.randbytes(1 << 20), (SOURCE_LINE * 20_000)[: 1 << 20], bytes(1 << 20))
    for number in range(max(1, megabytes // 20)):
        yield f"lib/libengine{number}.so", b"".join(roll.choice(parts) for _ in range(20))


def pack(path: Path, files: Iterator[tuple[str, bytes]]) -> int:
    """A plain tar and the same as gzip beside it. How many bytes the files have."""
    total = 0
    with tarfile.open(path, "w") as archive:
        for name, data in files:
            info = tarfile.TarInfo(name)
            info.size, info.mode, info.mtime = len(data), 0o755, 1_600_000_000
            archive.addfile(info, io.BytesIO(data))
            total += len(data)
    with path.open("rb") as plain, gzip.open(f"{path}.gz", "wb", compresslevel=6) as packed:
        shutil.copyfileobj(plain, packed)
    return total


def unpack_ours(layers: list[Path], target: Path) -> None:
    packed_bytes = sum(layer.stat().st_size for layer in layers)
    unpacker = Unpacker(target, UnpackCounter(Bounds(), packed_bytes), rootfs=True)
    for layer in layers:
        with layer.open("rb", buffering=0) as file:
            unpacker.add(read_tar(decompress_blocks(file)))
    unpacker.finish()


def unpack_tar(layers: list[Path], target: Path) -> None:
    for layer in layers:
        subprocess.run(["tar", "xf", str(layer), "-C", str(target)], check=True)


def timed(work: Callable[[list[Path], Path], None], layers: list[Path], target: Path) -> float:
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    os.sync()  # what the last round wrote is not this one's burden
    started = time.perf_counter()
    work(layers, target)
    return time.perf_counter() - started


def measure(name: str, layers: list[Path], folder: Path, rounds: int, size_bytes: int) -> float:
    ours, theirs = [], []
    for number in range(rounds + 1):
        pair = timed(unpack_ours, layers, folder / "ours"), timed(unpack_tar, layers, folder / "theirs")
        if number:  # the first round warms the page cache
            ours.append(pair[0])
            theirs.append(pair[1])
    mine, tar = statistics.median(ours), statistics.median(theirs)
    ratio = tar / mine
    speed = format_bytes(int(size_bytes / mine))
    print(f"{name:22} ours {mine:6.2f} s ({speed}/s)   tar x {tar:6.2f} s   ratio {ratio:5.2f} ×")
    return ratio


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--rounds", type=int, default=5)
    asked.add_argument("--files", type=int, default=10_000, help="small files")
    asked.add_argument("--megabytes", type=int, default=200, help="of large files")
    asked.add_argument("--folder", type=Path, default=None, help="where to write; the disk matters")
    options = asked.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder, roll, ratios = Path(name), random.Random(1), []
        for shape, files in (
            ("small", small_files(options.files, roll)),
            ("large", large_files(options.megabytes, roll)),
        ):
            plain = folder / f"{shape}.tar"
            size = pack(plain, files)
            for kind, layer in (("gzip", Path(f"{plain}.gz")), ("plain", plain)):
                ratios.append(measure(f"{shape} files, {kind}", [layer], folder, options.rounds, size))
    worst = min(ratios)
    print(f"worst ratio {worst:.2f} × tar x; target ≥ {TARGET} ×: {'met' if worst >= TARGET else 'MISSED'}")


if __name__ == "__main__":
    main()
