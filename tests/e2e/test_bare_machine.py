"""The README's two commands on a bare machine: a minimal Debian 12 in a root of its own, with nothing but Python, curl
and certificates. `scripts/up` sets up all it needs there, and the first chat is answered."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.processes import free_port

ROOT = Path(__file__).parents[2]
RUN_S = 1800.0  # debootstrap, pip, apt-get and a model come over the network, and other tests run beside it
pytestmark = [pytest.mark.long, pytest.mark.root, pytest.mark.timeout(2 * RUN_S)]

FLEET = """
set -eu
scripts/up --port $PORT --bus-port $BUS_PORT --blob-port $BLOB_PORT --ingress-port $INGRESS_PORT >/tmp/up.log 2>&1 &
tries=1200
until curl --fail --silent --output /dev/null http://127.0.0.1:$PORT/readyz; do
  tries=$((tries - 1)); [ $tries -gt 0 ] || { cat /tmp/up.log; exit 1; }
  sleep 0.5
done
corral=.venv/bin/corral
ask() { $corral chat smollm2-135m "What is a corral?" --max-tokens 24 >/tmp/answer 2>/tmp/progress; }
"""


class BareMachine:
    def __init__(self, root: Path) -> None:
        self.root = root

    def run(self, script: str, **env: str) -> str:
        """What it printed; everything it started has ended by then."""
        ports = {name: str(free_port()) for name in ("PORT", "BUS_PORT", "BLOB_PORT", "INGRESS_PORT")}
        told = " ".join(f"{name}={value}" for name, value in (ports | env).items())
        ran = subprocess.run(
            [ROOT / "scripts" / "_bare_machine", self.root, "sh", "-c", f"export {told}\n{script}"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=RUN_S,
            check=False,
        )
        assert ran.returncode == 0, f"{ran.stdout}\n{ran.stderr}\n{self.read('progress')}\n{self.read('up.log')}"
        return ran.stdout

    def read(self, name: str) -> str:
        path = self.root / "tmp" / name
        return path.read_text() if path.exists() else ""


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BareMachine]:
    if os.geteuid() != 0 or shutil.which("debootstrap") is None:
        pytest.skip("a minimal Debian is made by root, with debootstrap")
    root = tmp_path_factory.mktemp("bare") / "root"
    try:
        yield BareMachine(root)
    finally:
        shutil.rmtree(root, ignore_errors=True)  # its mounts ended with the commands


def test_from_two_commands_to_an_answer(machine: BareMachine) -> None:
    without = "if ldconfig -p | grep libgomp; then exit 1; fi"
    logs = "cat /var/lib/corral/logs/*.log >/tmp/logs"
    machine.run(f"{without}\n{FLEET}\nask\n$corral doctor --json >/tmp/doctor\n{logs}")
    assert len(machine.read("answer").split()) >= 5
    # The line of progress says so as well, for as long as it takes: less than a moment where the package is at hand.
    installed = [line for line in machine.read("logs").splitlines() if "system packages are installed" in line]
    assert installed
    assert all("libgomp1" in line for line in installed)
    found = json.loads(machine.read("doctor"))
    assert [each for each in found if each["level"] == "fail"] == []
    assert [each["level"] for each in found if each["about"] == "backends"] == ["ok"], "they do not run as root"


def test_where_the_worker_may_not_install_packages_the_command_to_type_is_told(machine: BareMachine) -> None:
    script = f"""
apt-get purge -y -qq libgomp1 >/dev/null
rm -rf /var/lib/corral
{FLEET}
if ask; then exit 1; fi
cp /tmp/progress /tmp/refusal
if $corral doctor --json >/tmp/doctor; then exit 1; fi
apt-get install -y -qq libgomp1 >/dev/null
timeout 120 $corral ops watch --to-the-end
ask
"""
    machine.run(script, CORRAL_INSTALL_SYSTEM_PACKAGES="false", CORRAL_HEARTBEAT_INTERVAL="1s")
    refusal = machine.read("refusal")
    assert "needs libgomp.so.1, which this machine lacks" in refusal
    assert "→ apt-get install libgomp1" in refusal
    (finding,) = [each for each in json.loads(machine.read("doctor")) if each["level"] == "fail"]
    assert (finding["about"], finding["fix"]) == ("backend", "run on that machine: apt-get install libgomp1")
    assert len(machine.read("answer").split()) >= 5, "the install went on by itself, and so did the chat"
