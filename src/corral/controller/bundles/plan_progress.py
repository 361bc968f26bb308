"""Counts the bytes of a plan for a bundle, and collects why it is not ready. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class PlanProgress:
    blobs: dict[str, int] = field(default_factory=dict)  # digest and size, each once
    have_bytes: int = 0
    size_bytes: int = 0
    is_complete: bool = True  # nothing is being fetched or looked up
    jobs: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def is_ready(self) -> bool:
        return self.is_complete and not self.jobs and not self.problems

    def add(self, digest: str, size_bytes: int, have_bytes: int, *, is_stored: bool) -> None:
        if not is_stored:
            self.is_complete = False
        if digest not in self.blobs:
            self.blobs[digest] = size_bytes
            self.size_bytes += size_bytes
            self.have_bytes += min(have_bytes, size_bytes)

    def wait(self) -> None:
        self.is_complete = False
