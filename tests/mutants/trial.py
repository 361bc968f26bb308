"""Runs the tests against one mutant at a time, in a copy of the checkout: unit tests that cover it, then integration
tests, then seeds of the simulation, until one fails.

The checkout is read and never written, so a killed run leaves nothing behind but its copy, which the next run removes.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.mutants.catalog import Mutant
from tests.mutants.covering import ImportGraph

KINDS = ("unit", "integration", "simulation")
_STAGE_LIMIT_S = {"unit": 600.0, "integration": 1200.0, "simulation": 3600.0}
_DISTANCES = {"unit": 1, "integration": 0}
_NO_TESTS = 5  # pytest's exit status
_MAX_UNSURE = 4  # tests of one kind that fail anyway, before the kind is given up
_FAILED_LINE = re.compile(r"^(?:FAILED|ERROR) (\S.*?)(?: - .*)?$", re.MULTILINE)
_MAKE_TEMPLATE = """
import asyncio, sys
from corral.store import open_store
async def main():
    async with open_store(f"sqlite:///{sys.argv[1]}"):
        pass
asyncio.run(main())
"""


@dataclass(frozen=True)
class Verdict:
    caught_by: str = ""  # the test or the seed; empty: it survived
    why: str = ""  # the first line that was said
    unsure: tuple[str, ...] = ()  # tests that failed with the mutant, and without it, too

    @property
    def survived(self) -> bool:
        return not self.caught_by


class WorkingCopy:
    """A copy of all files that git knows or would add, with the environment of the checkout."""

    def __init__(self, root: Path, folder: Path) -> None:
        self.root = folder / f"tree-{os.getpid()}"
        self._stamp = 0
        _remove_stale(folder)
        words = ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        listed = subprocess.run(words, check=True, capture_output=True, text=True)
        for name in filter(None, listed.stdout.split("\0")):
            source, target = root / name, self.root / name
            if source.is_file():
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source, target)
        (self.root / ".venv").symlink_to(root / ".venv")

    def write(self, path: Path, source: str) -> None:
        """With a time of its own: compiled code is found by whole seconds and size, and both may be as before."""
        target = self.root / path
        target.write_text(source)
        self._stamp += 10
        at = 1_500_000_000 + self._stamp
        os.utime(target, (at, at))

    def close(self) -> None:
        shutil.rmtree(self.root, ignore_errors=True)


def _remove_stale(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for left in folder.glob("tree-*"):
        number = left.name.removeprefix("tree-")
        if not (number.isdigit() and Path(f"/proc/{number}").exists()):
            shutil.rmtree(left, ignore_errors=True)


class Trial:
    def __init__(self, copy: WorkingCopy, *, kinds: Sequence[str] = KINDS, seeds: int = 200, jobs: int = 1) -> None:
        self._copy = copy
        self._kinds = kinds
        self._seeds = seeds
        self._jobs = jobs
        self._graph = ImportGraph(copy.root)
        self._template = copy.root / "template.db"

    def run(self, mutant: Mutant) -> Verdict:
        unsure: list[str] = []
        self._copy.write(mutant.path, mutant.source)
        try:
            for kind in (each for each in KINDS if each in self._kinds):
                by, why = self._run_kind(kind, mutant, unsure)
                if by:
                    return Verdict(by, why, tuple(unsure))
        finally:
            self._copy.write(mutant.path, mutant.original)
        return Verdict(unsure=tuple(unsure))

    def _run_kind(self, kind: str, mutant: Mutant, unsure: list[str]) -> tuple[str, str]:
        """What noticed it, and why. Tests that fail anyway are left out, and the others run again."""
        for _ in range(_MAX_UNSURE):
            by, why = self._run_seeds() if kind == "simulation" else self._run_tests(kind, mutant.module, unsure)
            if not by or not self._fails_anyway(mutant, by):
                return by, why
            unsure.append(by)
            if kind == "simulation":
                break
        return "", ""

    def _fails_anyway(self, mutant: Mutant, by: str) -> bool:
        """A test that fails without the mutant says nothing about it."""
        if by.startswith("took longer") or by == "seed none":
            return False
        self._copy.write(mutant.path, mutant.original)
        try:
            if by.startswith("seed "):
                number = int(by.removeprefix("seed "))
                return bool(self._first_bad_seed(range(number, number + 1))[0])
            return self._pytest([by], 300.0)[0] not in (0, _NO_TESTS)
        finally:
            self._copy.write(mutant.path, mutant.source)

    def _run_tests(self, kind: str, module: str, unsure: Sequence[str]) -> tuple[str, str]:
        files = self._graph.tests_of(module, kind, max_distance=_DISTANCES[kind])
        if not files:
            return "", ""
        left_out = [f"--deselect={test}" for test in unsure]
        status, said = self._pytest([*map(str, files), *left_out], _STAGE_LIMIT_S[kind])
        if status in (0, _NO_TESTS):
            return "", ""
        if status == -signal.SIGKILL:
            return f"took longer than {_STAGE_LIMIT_S[kind]:.0f} s ({kind})", ""
        names = _FAILED_LINE.findall(said)
        reasons = [line for line in said.splitlines() if line.startswith("E  ")]
        return (names[0] if names else str(files[0])), (reasons[0][1:].strip() if reasons else said.strip()[-300:])

    def _pytest(self, what: Sequence[str], limit_s: float) -> tuple[int, str]:
        words = ["-m", "pytest", "-x", "-q", "-n", "0", "--tb=short", "-m", "not long", *what]
        return self._python(words, limit_s)

    def _run_seeds(self) -> tuple[str, str]:
        return self._first_bad_seed(range(self._seeds))

    def _first_bad_seed(self, seeds: range) -> tuple[str, str]:
        if not self._template.exists():
            status, said = self._python(["-c", _MAKE_TEMPLATE, str(self._template)], 60.0)
            if status:
                return "took longer" if status == -signal.SIGKILL else "the schema of the store", said.strip()[-300:]
        jobs = max(1, min(self._jobs, len(seeds)))
        shares = [seeds[number::jobs] for number in range(jobs)]
        started = [self._start(["-m", "tests.mutants.seeds", str(self._template), *_range_words(s)]) for s in shares]
        try:
            found = _first_found(started, _STAGE_LIMIT_S["simulation"])
        finally:
            for process in started:
                _end(process)
        return (f"seed {found['seed']}", str(found["why"])) if found is not None else ("", "")

    def _python(self, words: Sequence[str], limit_s: float) -> tuple[int, str]:
        return _finish(self._start(words), limit_s)

    def _start(self, words: Sequence[str]) -> subprocess.Popen[str]:
        root = self._copy.root
        own = {name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"}  # meant for our caller
        return subprocess.Popen(
            [str(root / ".venv/bin/python"), *words],
            cwd=root,
            env={**own, "PYTHONPATH": f"{root / 'src'}:{root}", "PYTHONHASHSEED": "0"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )


def _range_words(seeds: range) -> list[str]:
    return [str(seeds.start), str(seeds.stop), str(seeds.step)]


def _first_found(started: Sequence[subprocess.Popen[str]], limit_s: float) -> dict[str, Any] | None:
    """What the first of them found; None: all have ended and found nothing."""
    deadline = time.monotonic() + limit_s
    waiting = list(started)
    while waiting:
        for process in [each for each in waiting if each.poll() is not None]:
            waiting.remove(process)
            status, said = _finish(process, 10.0)
            last = (said.strip().splitlines() or [""])[-1]
            found: dict[str, Any] | None = json.loads(last) if status == 0 else {"seed": "none", "why": last}
            if found is not None:
                return found
        if time.monotonic() > deadline:
            return {"seed": "none", "why": f"took longer than {limit_s:.0f} s"}
        time.sleep(0.05)
    return None


def _finish(process: subprocess.Popen[str], limit_s: float) -> tuple[int, str]:
    try:
        said, _ = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        _end(process)
        return -signal.SIGKILL, ""
    return process.returncode, said


def _end(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def default_jobs() -> int:
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else 1
