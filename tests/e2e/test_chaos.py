"""`scripts/chaos`, for a minute and without the language model: nothing is lost, whatever clients see meanwhile."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = [
    pytest.mark.long,
    pytest.mark.root,
    pytest.mark.timeout(900),
    pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root"),
]


def test_a_minute_of_chaos_loses_nothing() -> None:
    command = [sys.executable, "-m", "tests.chaos.main", "--minutes", "1", "--seed", "3", "--without-llm", "--json"]
    ran = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=850
    )
    assert ran.stdout, ran.stderr[-3000:]
    result = json.loads(ran.stdout)
    found = {key: result[key] for key in ("violations", "not_at_rest", "left_behind", "wrong_answers")}
    assert ran.returncode == 0, found
    assert sum(result["faults"].values()) > 0
    assert sum(result["answered"].values()) > 0
    assert result["looks"] > 0
