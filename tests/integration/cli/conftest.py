"""Fixtures for commands run in this process against a fleet played by a script."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from corral.cli.main import main
from tests.support.scripted_fleet import KEY, ScriptedFleet, scripted_fleet


@dataclass
class Ran:
    code: int
    out: str
    err: str

    def json(self) -> Any:
        return json.loads(self.out)


class Corral:
    """`corral("nodes", "list")` → what it printed and its exit code."""

    def __init__(self, fleet: ScriptedFleet, capsys: pytest.CaptureFixture[str]) -> None:
        self.fleet = fleet
        self._capsys = capsys

    def __call__(self, *words: str) -> Ran:
        code = main(list(words))
        printed = self._capsys.readouterr()
        return Ran(code, printed.out, printed.err)


def start(corral: Corral, *words: str, env: Mapping[str, str] | None = None, **more: object) -> subprocess.Popen[bytes]:
    told = {"CORRAL_URL": corral.fleet.url, "CORRAL_KEY": KEY, "COLUMNS": "200", "TERM": "xterm"}
    env = {**os.environ, **told, **(env or {})}
    return subprocess.Popen([sys.executable, "-m", "corral.cli.main", *words], env=env, **more)  # type: ignore[call-overload, no-any-return]


@pytest.fixture
def no_fleet(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in (
        "CORRAL_URL",
        "CORRAL_KEY",
        "CORRAL_KEY_FILE",
        "CORRAL_CA",
        "CORRAL_CONTEXT",
        "CORRAL_DATA",
        "NO_COLOR",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CORRAL_CONFIG_DIR", str(tmp_path / "config"))
    monkeypatch.setenv("HOME", str(tmp_path))


@pytest.fixture
def corral(no_fleet: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Corral]:
    with scripted_fleet() as fleet:
        monkeypatch.setenv("CORRAL_URL", fleet.url)
        monkeypatch.setenv("CORRAL_KEY", KEY)
        yield Corral(fleet, capsys)
