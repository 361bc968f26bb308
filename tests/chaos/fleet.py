"""A real fleet on machines of its own: network namespaces on one switch, processes that come back after they died.

with chaos_fleet(root) as fleet:
    fleet.members["worker-2"].kill()
    fleet.api("GET", "/api/nodes")

One machine has the bus, two controllers on PostgreSQL, two gateways and an image registry; each worker has a machine.
Root only. Every process can be killed, stopped and started again; `libfaketime` (Debian's package, if it is installed)
lets the clock of one process step.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench.support.star_network import Star, star
from corral.bus.auth import BusKeys
from corral.bus.embedded import ServerSettings, prepare_server
from corral.bus.keys import load_or_create_keys
from tests.support.backend_images import gallery_of, mock_image, openai_entry
from tests.support.fleet import Answer, http
from tests.support.image_registry import push_image
from tests.support.network import Machine
from tests.support.postgres import Postgres, running_postgres
from tests.support.processes import CORRAL, Process, clean_env
from tests.support.waiting import wait_for

GATEWAYS = (8080, 8081)
CONTROLLERS = (9090, 9091)
BUS_PORT, REGISTRY_PORT, BLOB_PORT, INGRESS_PORT = 4222, 5000, 9190, 50050
LINK_BYTES = 250e6  # per second: enough not to be in the way
START_S = 90.0
FAKETIME = next(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"), None)
MOCK, EXTRA = "farm-mock", "farm-extra"  # of models; installed and deleted while everything fails
# Shorter than the defaults, so that an hour has many outages and recoveries; not as short as those of tests.
PACE = {
    "CORRAL_HEARTBEAT_INTERVAL": "2s",
    "CORRAL_STALE_AFTER": "20s",
    "CORRAL_HEALTH_INTERVAL": "2s",
    "CORRAL_LEASE_TTL": "5s",
    "CORRAL_RETRY_FIRST": "1s",
    "CORRAL_RETRY_CAP": "10s",
    "CORRAL_RECONCILE_INTERVAL": "10s",
    "CORRAL_INVENTORY_INTERVAL": "10s",
    "CORRAL_LOAD_COOLDOWN": "5s",
    "CORRAL_MODEL_GALLERIES": "[]",
}


@dataclass
class Member:
    """One process of the fleet and how to start it again."""

    name: str
    command: tuple[str, ...]
    env: Mapping[str, str]
    log: Path
    clock: Path | None = None  # the file that libfaketime reads
    process: Process | None = None
    starts: int = 0
    is_stopped: bool = field(default=False)

    @property
    def role(self) -> str:
        return self.name.rpartition("-")[0] or self.name

    @property
    def is_up(self) -> bool:
        return self.process is not None and self.process.running

    def start(self) -> None:
        if not self.is_up:
            self.starts += 1
            self.is_stopped = False
            self.process = Process(self.command, self.env, self.log)

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.is_stopped = False

    def stop(self) -> None:
        """As a debugger or a machine that swaps stops it."""
        if self.is_up:
            assert self.process is not None
            self.process.signal(signal.SIGSTOP)
            self.is_stopped = True

    def resume(self) -> None:
        if self.is_up and self.is_stopped:
            assert self.process is not None
            self.process.signal(signal.SIGCONT)
            self.is_stopped = False

    def step_clock(self, seconds: float) -> None:
        if self.clock is not None:
            self.clock.write_text(f"{seconds:+.0f}s")


class ChaosFleet:
    def __init__(self, root: Path, network: Star, postgres: Postgres, *, workers: int) -> None:
        self.root = root
        self.postgres = postgres
        self.store_url = postgres.new_database()
        self.hub = network.add()
        self.machines = {f"worker-{number}": network.add() for number in range(workers)}
        self.disks: dict[str, Path] = {}
        self.registry_url = f"http://127.0.0.1:{REGISTRY_PORT}"
        self._secrets = root / "secrets"
        gallery = gallery_of(root / "galleries", *self.entries(1))
        self._env = clean_env(root / "home", **PACE, **gallery)
        self.members: dict[str, Member] = {}
        self._registry: Process | None = None

    @property
    def key(self) -> str:
        return (self._secrets / "admin.key").read_text().strip()

    @property
    def urls(self) -> list[str]:
        return [f"http://{self.hub.address}:{port}" for port in GATEWAYS]

    @property
    def workers(self) -> list[Member]:
        return [self.members[name] for name in self.machines if name in self.members]

    def entries(self, build: int) -> list[dict[str, Any]]:
        host = f"127.0.0.1:{REGISTRY_PORT}"
        extra = openai_entry(EXTRA, f"oci://{host}/farm/extra:{build}", version=f"{build}")
        return [openai_entry(MOCK, f"oci://{host}/farm/mock:1", version="1"), extra]

    def publish(self, build: int) -> None:
        """A newer build of the extra backend."""
        self.hub.run(lambda: push_image(self.registry_url, "farm/extra", f"{build}", mock_image(f"{build}")))
        gallery_of(self.root / "galleries", *self.entries(build))

    # Start and end

    def start(self) -> None:
        self._start_registry()
        self.hub.run(lambda: push_image(self.registry_url, "farm/mock", "1", mock_image("1")))
        self.publish(1)
        keys = load_or_create_keys(self._secrets / "bus", datetime.now(UTC))
        self._define_bus(keys)
        for number in range(2):
            self._define_controller(number)
            self._define_gateway(number)
        self.members["bus"].start()
        for number in range(2):
            self.members[f"controller-{number}"].start()
            self._wait_ready(f"http://127.0.0.1:{CONTROLLERS[number]}")  # the first makes what the second reads
            self.members[f"gateway-{number}"].start()
        for url in self.urls:
            self._wait_ready(url)
        for name, machine in self.machines.items():
            self._join(name, machine)
        for name in self.machines:
            wait_for(lambda name=name: self.nodes()[name]["status"] == "healthy", f"healthy {name}", START_S)  # type: ignore[misc]

    def close(self) -> None:
        for member in self.members.values():
            member.resume()
        for member in [*self.workers, *self.members.values()]:
            if member.process is not None:
                member.process.close()
        if self._registry is not None:
            self._registry.close()
        for disk in self.disks.values():
            subprocess.run(["umount", "--lazy", str(disk)], check=True, timeout=60)

    # From outside

    def api(self, method: str, path: str, body: object = None) -> Answer:
        """At whichever gateway answers."""
        for url in self.urls[:-1]:
            with contextlib.suppress(OSError):
                answer = self.hub.run(lambda url=url: http(method, url + path, key=self.key, body=body))  # type: ignore[misc]
                if answer.status not in (502, 503, 504):
                    return answer
        return self.hub.run(lambda: http(method, self.urls[-1] + path, key=self.key, body=body))

    def nodes(self) -> dict[str, dict[str, Any]]:
        answer = self.api("GET", "/api/nodes")
        assert answer.status == 200, answer.body
        return {node["name"]: node for node in answer.json()}

    def data_of(self, worker: str) -> Path:
        return self.disks.get(worker, self.root / worker)

    def command(self, *words: str) -> subprocess.CompletedProcess[str]:
        """A `corral` command of a person at the hub."""
        env = dict(self._env) | {"CORRAL_URL": self.urls[0], "CORRAL_KEY": self.key}
        line = [*self.hub.prefix, *CORRAL, *words]
        return subprocess.run(line, env=env, capture_output=True, text=True, timeout=300)

    # How each process is started

    def _start_registry(self) -> None:
        folder = self.root / "registry"
        folder.mkdir()
        program = shutil.which("docker-registry")
        if program is None:
            raise RuntimeError("needs Debian's docker-registry (apt-get install docker-registry)")
        config = {
            "version": 0.1,
            "log": {"level": "error"},
            "storage": {"filesystem": {"rootdirectory": str(folder / "data")}},
            "http": {"addr": f"127.0.0.1:{REGISTRY_PORT}"},
        }
        (folder / "config.yml").write_text(json.dumps(config))
        command = (*self.hub.prefix, program, "serve", str(folder / "config.yml"))
        self._registry = Process(command, clean_env(folder), folder / "log")
        wait_for(lambda: self.hub.run(lambda: http("GET", self.registry_url + "/v2/").status == 200), "image registry")

    def _define_bus(self, keys: BusKeys) -> None:
        server = ServerSettings(self.root / "bus", host=self.hub.address, port=BUS_PORT)
        prepared = self.hub.run(lambda: prepare_server(server, keys))
        self._define("bus", self.hub, prepared.argv, {}, fake_clock=False)

    def _define_controller(self, number: int) -> None:
        self._define(
            f"controller-{number}",
            self.hub,
            (*CORRAL, "controller"),
            {
                "CORRAL_DATA": str(self.root / f"controller-{number}"),
                "CORRAL_STORE": self.store_url,
                "CORRAL_HOST": "127.0.0.1",
                "CORRAL_PORT": str(CONTROLLERS[number]),
                "CORRAL_BUS_URLS": f"nats://{self.hub.address}:{BUS_PORT}",
                "CORRAL_BUS_KEYS": str(self._secrets / "bus"),
                "CORRAL_ADMIN_KEY_FILE": str(self._secrets / "admin.key"),
                "CORRAL_GATEWAY_KEY_FILE": str(self._secrets / "gateway.key"),
                "CORRAL_PUBLIC_URL": self.urls[number],
                "CORRAL_BLOB_HOST": self.hub.address,
                "CORRAL_BLOB_PORT": str(BLOB_PORT + number),
                "CORRAL_INSTANCE_ID": f"controller-{number}",
            },
        )

    def _define_gateway(self, number: int) -> None:
        self._define(
            f"gateway-{number}",
            self.hub,
            (*CORRAL, "gateway"),
            {
                "CORRAL_CONTROLLER": f"http://127.0.0.1:{CONTROLLERS[number]}",
                "CORRAL_GATEWAY_KEY_FILE": str(self._secrets / "gateway.key"),
                "CORRAL_HOST": self.hub.address,
                "CORRAL_PORT": str(GATEWAYS[number]),
            },
        )

    def _join(self, name: str, machine: Machine) -> None:
        made = self.api("POST", "/api/tokens", {"name": name, "pre_approved": True})
        assert made.status == 201, made.body
        data = self.data_of(name)
        data.mkdir(exist_ok=True)
        words: tuple[str, ...] = ("join", self.urls[len(self.members) % 2], "--name", name, "--data", str(data))
        words += ("--port", str(INGRESS_PORT), "--token", made.json()["secret"])
        member = self._define(name, machine, (*CORRAL, *words), {"HOME": str(self.root / f"home-{name}")})
        member.start()

    def _define(
        self, name: str, machine: Machine, command: tuple[str, ...], env: Mapping[str, str], *, fake_clock: bool = True
    ) -> Member:
        clock: Path | None = None
        own = {**self._env, **env}
        if FAKETIME is not None and fake_clock:
            clock = self.root / f"clock-{name}"
            clock.write_text("+0s")
            own |= {
                "LD_PRELOAD": str(FAKETIME),
                "FAKETIME_TIMESTAMP_FILE": str(clock),
                "FAKETIME_CACHE_DURATION": "1",
                "FAKETIME_DONT_FAKE_MONOTONIC": "1",
            }
        log = self.root / f"{name}.log"
        self.members[name] = Member(name, (*machine.prefix, *command), own, log, clock)
        return self.members[name]

    def _wait_ready(self, url: str) -> None:
        wait_for(lambda: self.hub.run(lambda: http("GET", url + "/readyz").status == 200), f"ready {url}", START_S)


@contextlib.contextmanager
def chaos_fleet(root: Path, *, workers: int = 4, small_disk: str = "") -> Iterator[ChaosFleet]:
    """`small_disk`: the size of a file system in memory for the data of the last worker, so that it can be full."""
    if os.geteuid() != 0:
        raise RuntimeError("network namespaces need root")
    with star(LINK_BYTES) as network, running_postgres() as postgres:
        fleet = ChaosFleet(root, network, postgres, workers=workers)
        try:
            if small_disk:
                folder = root / "small"
                folder.mkdir()
                mount = ["mount", "-t", "tmpfs", "-o", f"size={small_disk}", "tmpfs", str(folder)]
                subprocess.run(mount, check=True, timeout=60)
                fleet.disks[f"worker-{workers - 1}"] = folder
            fleet.start()
            yield fleet
        finally:
            fleet.close()
