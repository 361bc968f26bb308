"""Somebody else's NATS: with an account seed nodes are kept apart, with one password for all they are not, and TLS."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from corral.bus.auth import BusKeys, account_jwt, mint_service_credentials
from corral.bus.binary import find_nats_server
from corral.kit.certificates import Ca, make_ca
from tests.e2e.test_closed_by_default import Intruder, knock, register
from tests.support.cluster import Cluster, Member
from tests.support.fleet import PATIENT
from tests.support.processes import CORRAL, Process, free_port
from tests.support.waiting import DEADLINE_S, until, wait_for

pytestmark = pytest.mark.timeout(180)

CREDENTIAL_TTL_S = 12  # what a test does with one may take seconds; what waits for its end waits so long
PASSWORD = "kept-by-all-of-us"


class ExternalBus(Cluster):
    """A controller that is told about the bus by a person. `config` is the server's, without its address."""

    def __init__(self, root: Path, config: str, *, user: str = "", scheme: str = "nats", **told: str) -> None:
        super().__init__(root, f"sqlite:///{root}/corral.db", members=1, **PATIENT)
        self.config = config
        self.scheme = scheme
        self.user = user
        self.told = told

    @property
    def bus_url(self) -> str:
        return f"{self.scheme}://127.0.0.1:{self.bus_port}"

    def start_bus(self) -> None:
        file = self.root / "nats.conf"
        file.write_text(f"host: 127.0.0.1\nport: {self.bus_port}\n{self.config}\n")
        self.bus = Process((str(find_nats_server()), "--config", str(file)), self.env, self._log("bus"))
        wait_for(self._bus_listens, "bus")

    def start_controller(self, member: Member, **env: str) -> None:
        urls = self.bus_url.replace("://", f"://{self.user}@") if self.user else self.bus_url
        super().start_controller(member, **({"CORRAL_BUS_KEYS": "", "CORRAL_BUS_URLS": urls} | self.told | env))

    def doctor(self) -> subprocess.CompletedProcess[str]:
        where = ("--url", self.members[0].url, "--key", self.key, "--data", str(self.root / "no-fleet-here"))
        return subprocess.run(
            (*CORRAL, "doctor", *where), env=self.env, capture_output=True, text=True, timeout=60, check=False
        )

    def bus_facts(self) -> dict[str, bool]:
        return dict(self.api(self.members[0], "GET", "/api/cluster").json()["bus"])

    def attention(self) -> str:
        return "\n".join(self.api(self.members[0], "GET", "/api/cluster").json()["attention"])

    def join_healthy(self, name: str, **env: str) -> Process:
        member = self.members[0]
        worker = self.join(member, name, self.token(member, pre_approved=True), **env)
        self.wait_status(member, name, "healthy")
        wait_for(lambda: not self.nodes(member)[name].get("bus_down"), "node on the bus")
        return worker


def with_accounts(keys: BusKeys) -> str:
    """As the tools of NATS write it: accounts known beforehand, none taken at run time."""
    now = datetime.now(UTC)
    accounts = {
        key: account_jwt(keys.operator_seed, key, name=name, now=now)
        for name, key in (("fleet", keys.account), ("system", keys.system_account))
    }
    lines = [f"operator: {keys.operator_jwt}", f"system_account: {keys.system_account}", "resolver: MEMORY"]
    return "\n".join([*lines, "resolver_preload: {", *(f"  {key}: {jwt}" for key, jwt in accounts.items()), "}"])


def account_settings(keys: BusKeys) -> dict[str, str]:
    """What the owner of that NATS hands to the owner of the fleet."""
    service = mint_service_credentials(
        keys.account_seed, keys.service_user_seed, now=datetime.now(UTC), ttl_s=None, reply_ttl_s=900
    )
    return {
        "CORRAL_BUS_ACCOUNT_SEED": keys.account_seed,
        "CORRAL_BUS_SERVICE_JWT": service.jwt,
        "CORRAL_BUS_SERVICE_SEED": service.seed,
    }


@pytest.fixture(scope="module")
def keys() -> BusKeys:
    return BusKeys.generate(os.urandom, datetime.now(UTC))


@pytest.fixture(scope="module")
def by_account(tmp_path_factory: pytest.TempPathFactory, keys: BusKeys) -> Iterator[ExternalBus]:
    told = account_settings(keys) | {"CORRAL_BUS_CREDENTIAL_TTL": f"{CREDENTIAL_TTL_S}s"}
    cluster = ExternalBus(tmp_path_factory.mktemp("account"), with_accounts(keys), **told)
    try:
        yield cluster.start()  # type: ignore[misc]
    finally:
        cluster.close()


async def test_with_an_account_seed_each_node_keeps_to_its_own_subjects(by_account: ExternalBus) -> None:
    me, other = await register(by_account), await register(by_account)
    assert await knock(by_account) == "-ERR 'Authorization Violation'"
    intruder = Intruder(by_account.bus_url, me)
    client = await intruder.connect()
    try:
        await client.subscribe(f"nodes.{me['id']}.>")
        await client.publish(f"nodes.{me['id']}.heartbeat", b'{"available_ram":4242}')
        await client.flush()
        assert intruder.complaints == []
        await client.subscribe(f"nodes.{other['id']}.>")
        await client.publish(f"nodes.{other['id']}.heartbeat", b'{"available_ram":1}')
        await client.flush()

        async def both() -> bool:
            return len(intruder.complaints) == 2

        await until(both, "two complaints of the server")
        assert all("permissions violation" in complaint.lower() for complaint in intruder.complaints)
    finally:
        await client.close()
    member = by_account.members[0]
    nodes = await asyncio.to_thread(
        wait_for, lambda: (seen := by_account.nodes(member))[me["name"]]["available_ram"] == 4242 and seen, "heartbeat"
    )
    assert nodes[other["name"]]["available_ram"] != 1
    for told in (me, other):  # no machine stands behind them: a doctor would miss their ports
        assert by_account.api(member, "DELETE", f"/api/nodes/{told['name']}").status == 200


async def test_a_deleted_node_is_told_but_its_credential_ends_with_its_time(by_account: ExternalBus) -> None:
    member = by_account.members[0]
    worker = await asyncio.to_thread(by_account.join_healthy, "barn")
    assert by_account.bus_facts() == {"connected": True, "isolation": True, "revocation": False}
    advice = await asyncio.to_thread(by_account.doctor)
    assert advice.returncode == 0, advice.stdout
    assert "the credential of a deleted node works until it expires" in advice.stdout
    assert "--bus-credential-ttl" in advice.stdout

    taken = await register(by_account)
    for name in ("barn", taken["name"]):
        assert by_account.api(member, "DELETE", f"/api/nodes/{name}").status == 200
    assert await knock(by_account, taken) == "PONG", "nobody could tell the server"
    assert await asyncio.to_thread(worker.wait) == 1
    last = worker.output().splitlines()[-1]
    assert last.startswith("corral worker: this node was deleted from the cluster, and the controller refuses the join")

    async def refused() -> bool:
        return await knock(by_account, taken) == "-ERR 'Authorization Violation'"

    await until(refused, "end of the credential's time", CREDENTIAL_TTL_S + DEADLINE_S)


@pytest.mark.long
def test_one_password_for_everybody_works_and_is_called_what_it_is(tmp_path: Path) -> None:
    config = f"authorization: {{ user: corral, password: {PASSWORD} }}"
    cluster = ExternalBus(tmp_path, config, user=f"corral:{PASSWORD}", CORRAL_BUS_SHARED_CREDENTIALS="true")
    try:
        cluster.start()
        cluster.join_healthy("barn")
        assert cluster.bus_facts() == {"connected": True, "isolation": False, "revocation": False}
        assert "every node can read every other node's messages" in cluster.attention()
        advice = cluster.doctor()
        assert advice.returncode == 0, advice.stdout
        assert "all nodes share one credential" in advice.stdout
        for log in tmp_path.glob("*.log"):
            assert PASSWORD not in log.read_text(errors="replace"), log.name
    finally:
        cluster.close()


@pytest.fixture(scope="module")
def authority() -> Ca:
    made = make_ca("somebody else's CA", datetime.now(UTC))
    return Ca(made.certificate_pem, made.key_pem)


def issue(authority: Ca, folder: Path, name: str) -> tuple[Path, Path]:
    issued = authority.issue_server([name, "127.0.0.1"], datetime.now(UTC), life=timedelta(days=1))
    certificate, key = folder / f"{name}.crt", folder / f"{name}.key"
    certificate.write_text(issued.certificate_pem)
    key.write_text(issued.key_pem)
    return certificate, key


@pytest.mark.long
def test_a_bus_that_wants_certificates_gets_them(tmp_path: Path, keys: BusKeys, authority: Ca) -> None:
    (tmp_path / "ca.crt").write_text(authority.certificate_pem)
    server, server_key = issue(authority, tmp_path, "server")
    client, client_key = issue(authority, tmp_path, "client")
    tls = f"tls: {{ cert_file: '{server}', key_file: '{server_key}', ca_file: '{tmp_path}/ca.crt', verify: true }}"
    shown = {"CORRAL_BUS_CERT": str(client), "CORRAL_BUS_KEY": str(client_key)}
    told = account_settings(keys) | {"CORRAL_BUS_CA": f"{tmp_path}/ca.crt"}
    cluster = ExternalBus(tmp_path, f"{with_accounts(keys)}\n{tls}", scheme="tls", **told)
    member = cluster.members[0]
    try:
        cluster.start()  # without a certificate of its own
        wait_for(lambda: "The bus cannot be reached" in cluster.attention(), "honest word about the bus")
        assert member.controller is not None
        assert member.controller.stop() == 0
        cluster.start_controller(member, **shown)
        cluster.wait_ready(member)
        wait_for(lambda: cluster.bus_facts()["connected"], "controller on the bus")
        cluster.join_healthy("barn", **shown)
    finally:
        cluster.close()


@pytest.mark.parametrize(
    ("told", "line"),
    [
        ({}, "--bus-shared-credentials"),
        ({"CORRAL_BUS_ACCOUNT_SEED": "account"}, "--bus-service-jwt and --bus-service-seed"),
        ({"CORRAL_BUS_ACCOUNT_SEED": "SANONSENSE", "jwt": "", "seed": ""}, "--bus-account-seed"),
        ({"CORRAL_BUS_ACCOUNT_SEED": "user", "jwt": "", "seed": ""}, "--bus-account-seed"),
        ({"CORRAL_BUS_ACCOUNT_SEED": "account", "jwt": "nonsense", "seed": ""}, "--bus-service-jwt"),
        ({"CORRAL_BUS_ACCOUNT_SEED": "account", "jwt": "", "seed": "nonsense"}, "--bus-service-seed"),
        ({"CORRAL_BUS_SHARED_CREDENTIALS": "true", "CORRAL_BUS_CA": "/there/is/none"}, "/there/is/none"),
        ({"CORRAL_BUS_SHARED_CREDENTIALS": "true", "CORRAL_BUS_CERT": __file__}, "--bus-cert and --bus-key"),
    ],
)
def test_a_controller_that_cannot_use_the_bus_says_so_in_one_line(
    tmp_path: Path, keys: BusKeys, told: dict[str, str], line: str
) -> None:
    right = account_settings(keys)
    seeds = {"account": keys.account_seed, "user": keys.service_user_seed}
    env = {name: seeds.get(value, value) for name, value in told.items() if name.isupper()}
    if "jwt" in told:
        env["CORRAL_BUS_SERVICE_JWT"] = told["jwt"] or right["CORRAL_BUS_SERVICE_JWT"]
        env["CORRAL_BUS_SERVICE_SEED"] = told["seed"] or right["CORRAL_BUS_SERVICE_SEED"]
    cluster = ExternalBus(tmp_path, "", CORRAL_BUS_URLS=f"nats://corral:{PASSWORD}@127.0.0.1:{free_port()}", **env)
    member = cluster.members[0]
    cluster.start_controller(member)
    try:
        assert member.controller is not None
        assert member.controller.wait(60) == 1
        said = member.controller.output()
        assert "Traceback" not in said
        lines = [each for each in said.splitlines() if each.startswith("corral")]
        assert len(lines) == 1, said
        assert line in lines[0]
        for secret in (PASSWORD, *seeds.values(), "SANONSENSE"):
            assert secret not in said
    finally:
        cluster.close()
