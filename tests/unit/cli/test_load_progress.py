"""Which lines about a load are printed where there is no terminal."""

from __future__ import annotations

import pytest

from corral.cli.models.load_progress import LoadProgress
from corral.contract.loads import LoadStatus


def test_a_wait_for_memory_is_told_once_and_another_reason_again(capsys: pytest.CaptureFixture[str]) -> None:
    first = "no node can run tiny: barn: needs 19.5 GiB of RAM; RAM: 18.5 GiB free of 22.5 GiB"
    with LoadProgress() as progress:
        for message in (first, first.replace("18.5", "18.6"), first.replace("18.5 GiB", "900 MiB"), "barn is draining"):
            progress.show(LoadStatus(model="tiny", state="pending", message=message))
    assert capsys.readouterr().err.splitlines() == [f"tiny: {first}", "tiny: barn is draining"]
