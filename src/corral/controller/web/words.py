"""Numbers, moments and links as the page writes them. Pure. `static/words.js` does the same; a browser test compares
them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import UTC, datetime
from urllib.parse import quote

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def used_of(used: int, total: int) -> str:
    """Both in the unit of the whole: `3.2 / 24 GiB`."""
    step = _step(total)
    return f"{_short(used, step)} / {_short(total, step)} {_UNITS[step]}"


def size(count: int) -> str:
    step = _step(count)
    return f"{_short(count, step)} {_UNITS[step]}"


def ago(moment: datetime | None, now: datetime) -> str:
    if moment is None:
        return "never"
    # A heartbeat is stamped by the database, whose clock may be a little ahead of ours.
    seconds = max(0, math.floor((now - moment).total_seconds()))
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length or (unit == "min" and seconds >= 60):
            return f"{seconds // length} {unit} ago"
    return f"{seconds} s ago"


def until(moment: datetime | None, now: datetime) -> str:
    """The next try: `in 30 s`; what is due is `now`."""
    seconds = math.ceil((moment - now).total_seconds()) if moment else 0
    if seconds <= 0:
        return "now"
    for unit, length in (("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"in {seconds // length} {unit}"
    return f"in {seconds} s"


def took(begun: datetime | None, ended: datetime | None) -> str:
    if begun is None or ended is None:
        return ""
    seconds = max(0, round((ended - begun).total_seconds()))
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds // length} {unit}"
    return f"{seconds} s"


def parse_moment(stamp: str) -> datetime | None:
    """RFC 3339 as our views write it; what cannot be read, and the zero time of Go, count as never."""
    try:
        moment = datetime.fromisoformat(stamp)
    except ValueError:
        return None
    moment = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    return moment if moment.year > 1 else None


def counted(count: int, one: str, many: str) -> str:
    return f"{count} {one if count == 1 else many}"


def listed(words: Sequence[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}" if words else ""


def _step(count: int) -> int:
    step = 0
    while step < len(_UNITS) - 1 and count >= 1024 ** (step + 1):
        step += 1
    return step


def _short(count: int, step: int) -> str:
    """One decimal below ten. Rounded half up by hand: Python and the browser round ties differently."""
    value = count / 1024**step
    tenths = 10 if value < 10 else 1
    return f"{math.floor(value * tenths + 0.5) / tenths:g}"


_AS_BROWSERS_DO = "!'()*"  # what `encodeURIComponent` leaves alone beside letters, digits and -_.~


def node_href(name: str) -> str:
    return f"/nodes/{quote(name, safe=_AS_BROWSERS_DO)}"


def model_href(name: str) -> str:
    """A slash in the name stays: it reads better, and the route takes the rest of the path."""
    return f"/models/{quote(name, safe='/' + _AS_BROWSERS_DO)}"


def backend_href(name: str) -> str:
    return f"/fleet/backends#backend-{quote(name, safe=_AS_BROWSERS_DO)}"
