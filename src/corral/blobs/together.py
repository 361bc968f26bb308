"""Several files as one bar that never goes back. Pure: time is handed in."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from corral.blobs.progress import Meter, Progress, Tell
from corral.contract.messages.backends import Phase

FETCH_SHARE = 0.65  # of the work on a file that is unpacked afterwards


class Together:
    """Hears how far each file is and tells how far all are. What was there before counts as done but not as speed.

    The bytes are those fetched; once all are here, those of the archives that were read while unpacking. `share` counts
    both."""

    def __init__(
        self, sizes: Sequence[int], tell: Tell, monotonic: Callable[[], float], *, unpacked: Collection[int] = ()
    ) -> None:
        """`sizes` in bytes; 0 where nobody knows yet. `unpacked`: which of the files are unpacked after they came."""
        self._sizes = list(sizes)
        self._unpacked = dict.fromkeys(unpacked, 0.0)  # how much of each, 0 to 1
        self._have = [0] * len(sizes)
        self._there: list[int | None] = [None] * len(sizes)  # when it was first heard of
        self._tell = tell
        self._monotonic = monotonic
        self._meter = Meter()

    def there(self, index: int) -> None:
        """It is done, unpacked if it has to be, or was there before."""
        self.fetched(index)
        if index in self._unpacked:
            self._unpacked[index] = 1.0

    def fetched(self, index: int) -> None:
        """It is here, but perhaps not unpacked."""
        if self._there[index] is None:
            self._there[index] = self._sizes[index]
        self._have[index] = self._sizes[index]

    def watch(self, index: int) -> Tell:
        def tell(progress: Progress) -> None:
            if progress.total_bytes and not self._sizes[index]:
                self._sizes[index] = progress.total_bytes
            # What is unpacked or checked afterwards has been fetched.
            fetched = progress.current_bytes if progress.phase == Phase.DOWNLOADING else self._sizes[index]
            most = self._sizes[index] or fetched
            self._have[index] = max(self._have[index], min(fetched, most))
            if self._there[index] is None:
                self._there[index] = self._have[index]
            if progress.phase == Phase.EXTRACTING and index in self._unpacked and progress.total_bytes:
                done = min(1.0, progress.current_bytes / progress.total_bytes)
                self._unpacked[index] = max(self._unpacked[index], done)
            self.say(index, progress)

        return tell

    def say(self, index: int, progress: Progress) -> None:
        have, total = sum(self._have), sum(self._sizes) if all(self._sizes) else 0
        rate = self._meter.rate(have - sum(there or 0 for there in self._there), self._monotonic())
        share = self._share(total) if total else None
        if progress.phase == Phase.EXTRACTING and self._unpacked and have == total:
            total = sum(self._sizes[each] for each in self._unpacked)
            have = round(sum(self._sizes[each] * done for each, done in self._unpacked.items()))
            rate = progress.rate
        self._tell(Progress(progress.phase, progress.file, have, total, rate, index + 1, len(self._sizes), share))

    def _share(self, total: int) -> float:
        """Over all files, by their sizes."""
        done = 0.0
        for index, have in enumerate(self._have):
            if index in self._unpacked:
                done += FETCH_SHARE * have + (1.0 - FETCH_SHARE) * self._unpacked[index] * self._sizes[index]
            else:
                done += have
        return done / total
