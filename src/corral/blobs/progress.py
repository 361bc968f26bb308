"""Progress of transfers and unpacking: counted here, published elsewhere. Pure: the caller passes the time."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from corral.contract.messages.backends import Phase

RATE_WINDOW_S = 5.0


@dataclass(frozen=True, slots=True)
class Progress:
    phase: Phase
    file: str = ""
    current_bytes: int = 0
    total_bytes: int = 0  # 0: unknown
    rate: float = 0.0  # bytes per second over the last few seconds
    file_index: int = 0  # of several files: the number of this one, from 1; the bytes are those of all files
    file_count: int = 0
    share: float | None = None  # done part of all work, 0 to 1, independent of the bytes; None: as the bytes say
    sources: Mapping[str, int] = field(default_factory=dict)  # received bytes by source; empty: unknown
    banned: tuple[str, ...] = ()  # sources that sent wrong bytes


OnProgress = Callable[[Progress], None]


def ignore_progress(_progress: Progress) -> None:
    """For callers that do not want progress reports."""


class RateMeter:
    """Bytes per second over a sliding window: the current rate, not the average since the start."""

    def __init__(self, window_s: float = RATE_WINDOW_S) -> None:
        self._window_s = window_s
        self._seen: deque[tuple[float, int]] = deque()

    def rate(self, total_bytes: int, now_s: float) -> float:
        self._seen.append((now_s, total_bytes))
        while len(self._seen) > 2 and self._seen[1][0] <= now_s - self._window_s:
            self._seen.popleft()
        since_s, before = self._seen[0]
        passed = now_s - since_s
        # A part that starts again from zero must not give a negative rate.
        return max(0.0, (total_bytes - before) / passed) if passed > 0 else 0.0


class PartsProgress:
    """Adds up the progress of several parts: the sum of their bytes against the sum of their sizes.

    Bytes that were on the disk before (a resumed part) count as done, but not towards the rate.
    """

    def __init__(
        self, phase: Phase, on_progress: OnProgress, monotonic: Callable[[], float], *, total_bytes: int = 0
    ) -> None:
        self._phase = phase
        self._on_progress = on_progress
        self._monotonic = monotonic
        self._total = total_bytes
        self._done: dict[str, int] = {}
        self._first_seen: dict[str, int] = {}
        self._sources: dict[str, Mapping[str, int]] = {}  # by part
        self._banned: dict[str, None] = {}  # in order
        self._meter = RateMeter()

    def set_total(self, size_bytes: int) -> None:
        """Set the total size once it is known."""
        self._total = size_bytes

    def resume(self, part: str, size_bytes: int) -> None:
        """Record the bytes of a part that were on the disk already."""
        self._first_seen[part] = size_bytes
        self.at(part, size_bytes)

    def received_from(self, part: str, progress: Progress) -> None:
        """Record the sources of the part."""
        self._sources[part] = progress.sources or self._sources.get(part, {})
        self._banned.update(dict.fromkeys(progress.banned))

    def at(self, part: str, size_bytes: int) -> None:
        """Record how many bytes of the part are done."""
        self._done[part] = size_bytes
        done = sum(self._done.values())
        moved = done - sum(self._first_seen.values())
        total = max(self._total, done) if self._total else 0
        rate = self._meter.rate(moved, self._monotonic())
        sources, banned = _sum_sources(self._sources.values()), tuple(self._banned)
        self._on_progress(Progress(self._phase, part, done, total, rate, sources=sources, banned=banned))


def _sum_sources(each_part: Iterable[Mapping[str, int]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for sources in each_part:
        total.update(sources)
    return dict(total)


FETCH_SHARE = 0.65  # of the work on a file that is unpacked afterwards


class FilesProgress:
    """Turns the progress of each of several files into one progress that never goes back.

    Bytes that were on the disk before count as done, but not towards the rate. The reported bytes are those fetched;
    once all files are here, the bytes of the archives that unpacking has read. `share` counts both."""

    def __init__(
        self,
        sizes: Sequence[int],
        on_progress: OnProgress,
        monotonic: Callable[[], float],
        *,
        unpacked: Collection[int] = (),
    ) -> None:
        """`sizes` in bytes; 0 where unknown. `unpacked`: indexes of the files that are unpacked after they were
        fetched."""
        self._sizes = list(sizes)
        self._unpacked = dict.fromkeys(unpacked, 0.0)  # by index: the unpacked part, 0 to 1
        self._have = [0] * len(sizes)
        self._first_seen: list[int | None] = [None] * len(sizes)  # bytes at the first report
        self._on_progress = on_progress
        self._monotonic = monotonic
        self._meter = RateMeter()
        self._sources: list[Mapping[str, int]] = [{} for _ in sizes]
        self._banned: dict[str, None] = {}  # in order

    def complete(self, index: int) -> None:
        """The file is complete: fetched and unpacked now, or present before."""
        self.fetched(index)
        if index in self._unpacked:
            self._unpacked[index] = 1.0

    def fetched(self, index: int) -> None:
        """The file was fetched, but perhaps not unpacked."""
        if self._first_seen[index] is None:
            self._first_seen[index] = self._sizes[index]
        self._have[index] = self._sizes[index]

    def listener(self, index: int) -> OnProgress:
        def on_progress(progress: Progress) -> None:
            if progress.total_bytes and not self._sizes[index]:
                self._sizes[index] = progress.total_bytes
            # A file that is being unpacked or checked has been fetched.
            fetched = progress.current_bytes if progress.phase == Phase.DOWNLOADING else self._sizes[index]
            most = self._sizes[index] or fetched
            self._have[index] = max(self._have[index], min(fetched, most))
            if self._first_seen[index] is None:
                self._first_seen[index] = self._have[index]
            if progress.phase == Phase.EXTRACTING and index in self._unpacked and progress.total_bytes:
                done = min(1.0, progress.current_bytes / progress.total_bytes)
                self._unpacked[index] = max(self._unpacked[index], done)
            self._sources[index] = progress.sources or self._sources[index]
            self._banned.update(dict.fromkeys(progress.banned))
            self._report(index, progress)

        return on_progress

    def _report(self, index: int, progress: Progress) -> None:
        have, total = sum(self._have), sum(self._sizes) if all(self._sizes) else 0
        rate = self._meter.rate(have - sum(there or 0 for there in self._first_seen), self._monotonic())
        share = self._share(total) if total else None
        if progress.phase == Phase.EXTRACTING and self._unpacked and have == total:
            total = sum(self._sizes[each] for each in self._unpacked)
            have = round(sum(self._sizes[each] * done for each, done in self._unpacked.items()))
            rate = progress.rate
        self._on_progress(
            Progress(
                progress.phase,
                progress.file,
                have,
                total,
                rate,
                index + 1,
                len(self._sizes),
                share,
                _sum_sources(self._sources),
                tuple(self._banned),
            )
        )

    def _share(self, total: int) -> float:
        """The done part of all files, weighted by their sizes."""
        done = 0.0
        for index, have in enumerate(self._have):
            if index in self._unpacked:
                done += FETCH_SHARE * have + (1.0 - FETCH_SHARE) * self._unpacked[index] * self._sizes[index]
            else:
                done += have
        return done / total
