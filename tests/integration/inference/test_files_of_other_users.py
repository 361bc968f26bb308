"""Where backends run as somebody else, they can read and write the files of a request; nobody else can."""

from __future__ import annotations

import os
import pwd
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from corral.inference.request_files import LocalFiles
from corral.worker.ingress.bridges import open_request_files

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away"),
]


@pytest.fixture
def public() -> Iterator[Path]:
    """Pytest's own folders are for root only."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o711)
        yield Path(folder)


def shell(script: str, *, user: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["/bin/sh", "-c", script], user=user, capture_output=True, text=True, cwd="/", timeout=20)


async def test_the_backends_user_reads_and_writes(public: Path) -> None:
    files: LocalFiles = open_request_files(public / "requests", "nobody")
    old_mask = os.umask(0o077)  # as a careful administrator has it
    try:
        async with files.open() as folder:
            sent = folder.here / "input.wav"
            sent.write_text("sound")
            path = await folder.hand_over(sent)
            there = await folder.output_path("speech.wav")
            assert shell(f"cat {path}", user="nobody").stdout == "sound"
            assert shell(f"echo spoken > {there}", user="nobody").returncode == 0
            assert (await folder.fetch("speech.wav")).read_text() == "spoken\n"
            assert pwd.getpwuid(sent.stat().st_uid).pw_name == "nobody"
            assert shell(f"cat {path}", user="daemon").returncode != 0
            assert shell(f"ls {public / 'requests'}", user="daemon").returncode != 0
            with pytest.raises(FileNotFoundError):
                await folder.fetch("other")
        assert list((public / "requests").iterdir()) == []
    finally:
        os.umask(old_mask)
