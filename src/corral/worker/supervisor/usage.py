"""How much memory a process has been seen to hold: what its successors are placed by.

Of processes in RAM only. What one holds on an accelerator the driver tells of numbers that mean nothing inside a
container; there the estimate stands.
"""

from __future__ import annotations

import re
from pathlib import Path

import psutil

_HIGH_WATER = re.compile(rb"^VmHWM:\s*(\d+) kB", re.MULTILINE)
_FINEST = 16 * 1024**2


def coarse(size_bytes: int) -> int:
    """Rounded up, by a sixteenth at most where it is large: so that what grows a little every day is no news."""
    if size_bytes <= 0:
        return 0
    step = max(_FINEST, 1 << max(0, size_bytes.bit_length() - 5))
    return -(-size_bytes // step) * step


def most_held(shim_pid: int) -> int:
    """The most that the backend and its children have held, each by itself; where the system does not keep that, what
    they hold now. Weights that are mapped count as far as they were read."""
    try:
        processes = psutil.Process(shim_pid).children(recursive=True)
    except psutil.Error:
        return 0
    return sum(map(_most_of, processes))


def _most_of(process: psutil.Process) -> int:
    try:
        found = _HIGH_WATER.search(Path(f"/proc/{process.pid}/status").read_bytes())
        return int(found[1]) * 1024 if found else process.memory_info().rss
    except OSError:
        pass
    try:
        return int(process.memory_info().rss)
    except psutil.Error:
        return 0
