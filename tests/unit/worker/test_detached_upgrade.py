"""What an upgrade that a controller has ordered leaves in upgrade.json, however it ends before the trial."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from corral.kit.errors import Conflict, CorralError, Failed
from corral.worker.upgrade import detached
from corral.worker.upgrade.build import UnusableVersion
from corral.worker.upgrade.trial import Trial, TrialState, read_trial, write_trial


@pytest.fixture
def wheel(tmp_path: Path) -> Iterator[Path]:
    """In a folder of its own, as the worker has fetched it."""
    before = {number: signal.getsignal(number) for number in (signal.SIGHUP, signal.SIGTERM)}
    path = tmp_path / "upgrade-files" / "corral-2.0-py3-none-any.whl"
    path.parent.mkdir()
    path.touch()
    yield path
    for number, handler in before.items():
        signal.signal(number, handler)


def run(monkeypatch: pytest.MonkeyPatch, data: Path, wheel: Path, upgrade: Any) -> int:
    monkeypatch.setattr(detached, "upgrade", upgrade)
    return detached.main(str(data), str(wheel), "", "op:1", "60")


@pytest.mark.parametrize(
    ("error", "reason", "is_final"),
    [
        (UnusableVersion("the new version does not work here: no module"), "does not work here: no module", True),
        (Failed("the disk is full: free some space"), "the disk is full", False),
        (OSError(28, "No space left on device"), "No space left on device", False),
    ],
)
def test_what_is_not_tried_is_in_the_file(
    tmp_path: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, reason: str, is_final: bool
) -> None:
    def upgrade(data: Path, path: Path, _say: object, *, order: str, **more: Any) -> Trial:
        assert (path, more["packages"], more["ready_s"]) == (wheel, None, 60.0)
        write_trial(data, Trial("/old", "/new", TrialState.BUILDING, order=order))
        raise error

    assert run(monkeypatch, tmp_path, wheel, upgrade) == 1
    found = read_trial(tmp_path)
    assert found is not None
    assert (found.state, found.old, found.new, found.order) == (TrialState.REJECTED, "/old", "/new", "op:1")
    assert (reason in found.reason, found.is_final) == (True, is_final)
    assert not wheel.parent.exists(), "the wheels are removed"


def test_a_signal_cancels_a_build(tmp_path: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def upgrade(data: Path, _path: Path, _say: object, *, order: str, **_more: Any) -> Trial:
        write_trial(data, Trial("/old", "/new", TrialState.BUILDING, order=order))
        signal.raise_signal(signal.SIGTERM)
        raise AssertionError("it goes on")

    with pytest.raises(SystemExit):
        run(monkeypatch, tmp_path, wheel, upgrade)
    found = read_trial(tmp_path)
    assert found is not None
    assert (found.state, found.reason, found.is_final) == (TrialState.REJECTED, "cancelled", False)
    assert not wheel.parent.exists()


@pytest.mark.parametrize("error", [Conflict("another upgrade of this machine is in progress"), None])
def test_the_file_of_another_upgrade_and_of_a_trial_stay(
    tmp_path: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch, error: CorralError | None
) -> None:
    """A trial that has begun writes itself how it ends."""
    known = Trial("/old", "/new", TrialState.WATCHING, order="op:1" if error is None else "other:1")
    write_trial(tmp_path, known)

    def upgrade(*_words: object, **_more: Any) -> Trial:
        raise error or Failed("the trial of the new version does not end")

    assert run(monkeypatch, tmp_path, wheel, upgrade) == 1
    assert read_trial(tmp_path) == known
