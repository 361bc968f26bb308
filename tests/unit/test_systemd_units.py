"""The units in packaging/ are ones that systemd reads without a complaint."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

UNITS = Path(__file__).parents[2] / "packaging" / "systemd"
ANALYZE = shutil.which("systemd-analyze")


@pytest.mark.skipif(ANALYZE is None, reason="no systemd-analyze on this machine")
def test_systemd_reads_every_unit_without_a_complaint(tmp_path: Path) -> None:
    assert ANALYZE is not None
    for unit in UNITS.iterdir():
        # Neither the program nor the user need be on the machine that runs this test.
        text = re.sub(r"(?m)^(Exec\w+)=\S+", r"\1=/bin/true", unit.read_text())
        (tmp_path / unit.name).write_text(re.sub(r"(?m)^(User|SupplementaryGroups)=.*\n", "", text))
    checked = subprocess.run(
        [ANALYZE, "verify", *sorted(str(each) for each in tmp_path.iterdir())],
        capture_output=True,
        text=True,
        timeout=60,
    )
    ours = [line for line in checked.stderr.splitlines() if "corral" in line]
    assert ours == []


def test_each_socket_unit_has_its_service() -> None:
    for unit in UNITS.glob("*.socket"):
        assert unit.with_suffix(".service").is_file()
