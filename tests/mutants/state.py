"""Results of earlier runs, so that one that was interrupted goes on where it was."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.mutants.catalog import Mutant
from tests.mutants.trial import Verdict


class State:
    """A result counts for the same mutated source and the same choice of tests. A survivor is not kept for good: the
    tests may know better by now, so it is known only until a test file changes."""

    def __init__(self, path: Path, *, kinds: Sequence[str], seeds: int) -> None:
        self._path = path
        self._choice = f"{','.join(kinds)} {seeds}"
        self._rows: dict[str, dict[str, Any]] = json.loads(path.read_text()) if path.exists() else {}

    def find(self, mutant: Mutant) -> Verdict | None:
        row = self._rows.get(mutant.name)
        if row is None or (row["fingerprint"], row["choice"]) != (mutant.fingerprint, self._choice):
            return None
        if not row["caught_by"] and row["tests"] != _newest_test():
            return None
        return Verdict(row["caught_by"], row["why"], tuple(row["unsure"]))

    def put(self, mutant: Mutant, verdict: Verdict) -> None:
        self._rows[mutant.name] = {
            "fingerprint": mutant.fingerprint,
            "choice": self._choice,
            "caught_by": verdict.caught_by,
            "why": verdict.why,
            "unsure": list(verdict.unsure),
            "tests": _newest_test(),
        }
        self._path.parent.mkdir(parents=True, exist_ok=True)
        beside = self._path.with_suffix(f".{os.getpid()}")
        beside.write_text(json.dumps(self._rows, indent=2))
        beside.replace(self._path)


def _newest_test() -> float:
    return max(path.stat().st_mtime for path in Path(__file__).parents[1].rglob("*.py"))
