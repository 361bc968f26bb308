"""Runs seeds of the simulation until the first one that fails, and says which in one line of JSON.

python -m tests.mutants.seeds TEMPLATE FIRST STOP STEP
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests.simulation.simulation import simulate
from tests.simulation.trouble import chaos


def first_failure(template: Path, seeds: range) -> dict[str, object] | None:
    for seed in seeds:
        try:
            simulate(seed, template, chaos=chaos)
        except Exception as error:
            said = str(error).strip().splitlines() or [repr(error)]
            return {"seed": seed, "why": said[0]}
    return None


def main() -> None:
    template, numbers = Path(sys.argv[1]), [int(word) for word in sys.argv[2:]]
    print(json.dumps(first_failure(template, range(*numbers))), flush=True)


if __name__ == "__main__":
    main()
