"""The join line as a person pastes it into a second terminal: no name, no port, nothing thought about beforehand."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.support.fleet import PATIENT, Fleet, http
from tests.support.processes import Process, free_port, kept_port
from tests.support.waiting import wait_for

pytestmark = pytest.mark.timeout(180)

USUAL_INGRESS_PORT = 50050


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    root = tmp_path_factory.mktemp("line")
    fleet = Fleet(root, **PATIENT)
    fleet.data = root / "home" / ".local" / "share" / "corral"  # where it is when nobody says --data
    try:
        yield fleet.start()
    finally:
        fleet.close()


@pytest.fixture
def usual_port_is_taken() -> Iterator[None]:
    """By us, or by whoever had it before."""
    with contextlib.ExitStack() as held:
        holder = held.enter_context(socket.socket())
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with contextlib.suppress(OSError):
            holder.bind(("127.0.0.1", USUAL_INGRESS_PORT))
            holder.listen()
        yield


def wait_told(worker: Process, words: str) -> None:
    wait_for(lambda: words in worker.output(), f"{words!r} from the worker")


@pytest.mark.usefixtures("usual_port_is_taken")
def test_pasted_on_the_same_machine_it_becomes_a_second_node_under_another_name(fleet: Fleet) -> None:
    own = fleet.own_node()
    fleet.wait_status(own, "healthy")
    worker = fleet.paste(fleet.join_line(), "second")
    name = fleet.newcomer(own)
    assert name.startswith(socket.gethostname())
    node = fleet.wait_status(name, "pending")
    port = urlsplit(node["ingress_url"]).port
    assert port not in (None, USUAL_INGRESS_PORT)
    wait_told(worker, f"corral nodes approve {name}")

    approved = fleet.cli("nodes", "approve", name)
    assert (approved.returncode, approved.stdout) == (0, f"{name} approved: healthy\n")
    fleet.wait_status(name, "healthy")
    wait_for(lambda: http("GET", f"{node['ingress_url']}/readyz").status == 200, "ingress that is ready")
    assert fleet.status(own) == "healthy"

    assert worker.stop() == 0
    again = fleet.paste("corral join", "second")
    back = fleet.wait_status(name, "healthy")
    assert (back["id"], len(fleet.nodes())) == (node["id"], 2), "the data folder alone says who it is"
    assert urlsplit(back["ingress_url"]).port == port, "it leaves the usual port to the other worker"
    assert again.running


def lines(worker: Process) -> list[str]:
    """Without the log, which goes to the same file."""
    return [line for line in worker.output().splitlines() if line]


def test_four_lines_lead_a_person_from_the_line_to_a_ready_node(fleet: Fleet) -> None:
    worker = fleet.join("friendly", token=fleet.token(), options=("--no-verbose",))
    fleet.wait_status("friendly", "pending")
    waiting = "Waiting for approval: run `corral nodes approve friendly` on the fleet"
    wait_for(lambda: waiting in lines(worker), "command that approves")
    assert fleet.cli("nodes", "approve", "friendly").returncode == 0
    wait_for(lambda: len(lines(worker)) >= 4, "four lines")
    fleet.wait_status("friendly", "healthy")
    assert lines(worker) == [
        f"Connecting to {fleet.url}",
        waiting,
        "Approved as friendly",
        "Ready. Ctrl-C stops the worker; `corral worker` starts it again",
    ]
    assert worker.stop() == 0
    assert len(lines(worker)) == 4


def test_a_blocked_bus_or_ingress_is_named_with_what_opens_it(fleet: Fleet) -> None:
    closed = free_port()
    token = fleet.token("--pre-approved")
    options = ("--no-verbose", "--advertise", f"127.0.0.1:{closed}")
    worker = fleet.join("walled", token=token, options=options)
    wait_for(lambda: f"The fleet cannot reach this machine at http://127.0.0.1:{closed}" in worker.output(), "hint")
    assert f"`sudo ufw allow {closed}/tcp`" in worker.output()
    assert worker.stop() == 0
    with kept_port() as held:
        port = held.getsockname()[1]
        options = ("--no-verbose", "--bus-urls", f"nats://127.0.0.1:{port}")
        worker = fleet.join("busless", token=fleet.token("--pre-approved"), options=options)
        blocked = f"The fleet answers, but not its bus, 127.0.0.1 port {port}: open TCP port {port} on 127.0.0.1"
        wait_for(lambda: blocked in worker.output(), "hint about the bus")
        assert "Ready" not in worker.output()
        worker.close()


def test_the_line_is_good_for_one_machine(fleet: Fleet) -> None:
    words = fleet.join_line().split()[1:]
    known = set(fleet.nodes())
    told = fleet.refused(*words, "--data", str(fleet.root / "third"), "--name", "third")
    assert "the controller refuses the join token" in told
    assert "corral token create" in told
    assert set(fleet.nodes()) == known


def test_in_the_folder_of_the_fleets_own_worker_it_says_who_is_there(fleet: Fleet) -> None:
    """Without --data the second terminal means the same folder as the first: `up` with nothing said runs there."""
    line = fleet.token()
    told = fleet.refused("join", fleet.url, "--token", line)
    assert f"another worker (pid {fleet.child_pid('worker')})" in told
    assert "--data" in told


def test_a_name_somebody_insists_on_is_not_changed_behind_their_back(fleet: Fleet, tmp_path: Path) -> None:
    own = fleet.own_node()
    token = fleet.token()
    told = fleet.refused("join", fleet.url, "--token", token, "--name", own, "--data", str(tmp_path / "twin"))
    assert f"another machine is already called {own}" in told
    assert f"corral nodes replace {own}" in told
    fleet.paste(f"corral join {fleet.url} --token {token} --name insisted --port 0", "insisted")
    assert fleet.wait_status("insisted", "pending"), "the refusal did not spend the token"
