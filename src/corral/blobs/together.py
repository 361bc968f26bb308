"""Several files as one bar that never goes back. Pure: time is handed in."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from corral.blobs.progress import Meter, Progress, Tell
from corral.contract.messages.backends import Phase


class Together:
    """Hears how far each file is and tells how far all are. What was there before counts as done but not as speed."""

    def __init__(self, sizes: Sequence[int], tell: Tell, monotonic: Callable[[], float]) -> None:
        """`sizes` in bytes; 0 where nobody knows yet."""
        self._sizes = list(sizes)
        self._have = [0] * len(sizes)
        self._there: list[int | None] = [None] * len(sizes)  # when it was first heard of
        self._tell = tell
        self._monotonic = monotonic
        self._meter = Meter()

    def there(self, index: int) -> None:
        """It is done, or was there before."""
        if self._there[index] is None:
            self._there[index] = self._sizes[index]
        self._have[index] = self._sizes[index]

    def watch(self, index: int) -> Tell:
        def tell(progress: Progress) -> None:
            if progress.total_bytes and not self._sizes[index]:
                self._sizes[index] = progress.total_bytes
            # What is unpacked or checked afterwards has been fetched: it moves the words, not the bar.
            fetched = progress.current_bytes if progress.phase == Phase.DOWNLOADING else self._sizes[index]
            most = self._sizes[index] or fetched
            self._have[index] = max(self._have[index], min(fetched, most))
            if self._there[index] is None:
                self._there[index] = self._have[index]
            self.say(index, progress)

        return tell

    def say(self, index: int, progress: Progress) -> None:
        have = sum(self._have)
        self._tell(
            Progress(
                progress.phase,
                progress.file,
                have,
                sum(self._sizes) if all(self._sizes) else 0,
                self._meter.rate(have - sum(there or 0 for there in self._there), self._monotonic()),
                index + 1,
                len(self._sizes),
            )
        )
