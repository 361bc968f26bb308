"""Several controllers, each with a gateway, on one database and one bus: what an operator would run by hand."""

from __future__ import annotations

import socket
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from corral.bus.auth import BusKeys
from corral.bus.embedded import ServerSettings, prepare_server
from corral.bus.keys import load_or_create_keys
from tests.support.fleet import SHORT, START_S, Answer, http
from tests.support.processes import CORRAL, Process, clean_env, free_port
from tests.support.waiting import DEADLINE_S, wait_for


class Member:
    """One controller and its gateway."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.controller_port = free_port()
        self.port = free_port()
        self.controller: Process | None = None
        self.gateway: Process | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


class Cluster:
    def __init__(self, root: Path, store_url: str, *, members: int = 2, **env: str) -> None:
        self.root = root
        self.store_url = store_url
        self.secrets = root / "secrets"
        self.env = clean_env(root / "home", **(SHORT | env))
        self.bus_port = free_port()
        self.bus: Process | None = None
        self.members = [Member(number) for number in range(members)]
        self.workers: list[Process] = []
        self.corral: tuple[str, ...] = CORRAL  # of the processes that start from now on
        self._logs = 0

    @property
    def keys(self) -> BusKeys:
        return load_or_create_keys(self.secrets / "bus", datetime.now(UTC))

    @property
    def key(self) -> str:
        return (self.secrets / "admin.key").read_text().strip()

    @property
    def bus_url(self) -> str:
        return f"nats://127.0.0.1:{self.bus_port}"

    def start(self) -> Cluster:
        self.start_bus()
        for member in self.members:
            self.start_controller(member)
            self.wait_ready(member)  # one after the other: the first makes the files the second reads
            self.start_gateway(member)
        for member in self.members:
            self.wait_gateway(member)
        return self

    def start_bus(self) -> None:
        prepared = prepare_server(ServerSettings(self.root / "bus", port=self.bus_port), self.keys)
        self.bus = Process(prepared.argv, self.env, self._log("bus"))
        wait_for(self._bus_listens, "bus")

    def start_controller(self, member: Member, **env: str) -> None:
        told = {
            "CORRAL_DATA": str(self.root / f"controller-{member.number}"),
            "CORRAL_STORE": self.store_url,
            "CORRAL_HOST": "127.0.0.1",
            "CORRAL_PORT": str(member.controller_port),
            "CORRAL_BUS_URLS": self.bus_url,
            "CORRAL_BUS_KEYS": str(self.secrets / "bus"),
            "CORRAL_ADMIN_KEY_FILE": str(self.secrets / "admin.key"),
            "CORRAL_GATEWAY_KEY_FILE": str(self.secrets / "gateway.key"),
            "CORRAL_PUBLIC_URL": member.url,
            "CORRAL_INSTANCE_ID": f"controller-{member.number}",
        }
        member.controller = Process(
            (*self.corral, "controller"), self.env | told | env, self._log(f"controller-{member.number}")
        )

    def start_gateway(self, member: Member, **env: str) -> None:
        told = {
            "CORRAL_CONTROLLER": f"http://127.0.0.1:{member.controller_port}",
            "CORRAL_GATEWAY_KEY_FILE": str(self.secrets / "gateway.key"),
            "CORRAL_PORT": str(member.port),
        }
        member.gateway = Process(
            (*self.corral, "gateway"), self.env | told | env, self._log(f"gateway-{member.number}")
        )

    def wait_ready(self, member: Member, timeout_s: float = START_S) -> None:
        def ready() -> bool:
            assert member.controller is not None
            assert member.controller.running, member.controller.output()
            return http("GET", f"http://127.0.0.1:{member.controller_port}/readyz").status == 200

        wait_for(ready, f"ready controller {member.number}", timeout_s)

    def wait_gateway(self, member: Member) -> None:
        """Until it serves models. It passes requests for the controller on before it has a view, and refuses others."""
        wait_for(lambda: http("GET", member.url + "/readyz").status == 200, f"ready gateway {member.number}", START_S)

    def api(self, member: Member, method: str, path: str, body: object = None) -> Answer:
        return http(method, member.url + path, key=self.key, body=body)

    def nodes(self, member: Member) -> dict[str, dict[str, Any]]:
        answer = self.api(member, "GET", "/api/nodes")
        assert answer.status == 200, answer.body
        return {node["name"]: node for node in answer.json()}

    def wait_status(self, member: Member, name: str, status: str, timeout_s: float = START_S) -> dict[str, Any]:
        """The node as it was when it was so."""

        def look() -> dict[str, Any]:
            node = self.nodes(member)[name]
            assert node["status"] == status, node
            return node

        return wait_for(look, f"{status} node {name}", timeout_s)

    def token(self, member: Member, **asked: object) -> str:
        answer = self.api(member, "POST", "/api/tokens", asked)
        assert answer.status == 201, answer.body
        return str(answer.json()["secret"])

    def join(self, member: Member, name: str, token: str = "", **env: str) -> Process:
        words = ["join", member.url, "--name", name, "--data", str(self.root / f"worker-{name}")]
        words += ["--port", str(free_port()), *(["--token", token] if token else [])]
        worker = Process((*self.corral, *words), self.env | env, self._log(f"worker-{name}"))
        self.workers.append(worker)
        return worker

    def close(self) -> None:
        for worker in self.workers:
            worker.close()
        for member in self.members:
            for process in (member.gateway, member.controller):
                if process is not None:
                    process.close()
        if self.bus is not None:
            self.bus.close()

    def _log(self, name: str) -> Path:
        self._logs += 1
        return self.root / f"{self._logs:02}-{name}.log"

    def _bus_listens(self) -> bool:
        with socket.create_connection(("127.0.0.1", self.bus_port), timeout=DEADLINE_S):
            return True
