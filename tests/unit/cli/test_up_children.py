"""What `up` starts with which settings, and what it says."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from corral.cli.common.data_folder import DataFolder, run_folder
from corral.cli.up.children import (
    Site,
    controller_settings,
    gateway_settings,
    role_child,
    role_env,
    worker_settings,
)
from corral.cli.up.settings import UpSettings
from corral.cli.up.startup import ready_message
from corral.contract.local_sockets import check_socket_folder
from corral.controller.settings import ControllerSettings
from corral.gateway.settings import GatewaySettings
from corral.kit.settings import BadSettings, read_settings
from corral.worker.settings import WorkerSettings

SITE = Site(
    folder=DataFolder(Path("/data")),
    run=Path("/run/x"),
    bind="127.0.0.1",
    port=8080,
    bus_port=4222,
    ingress_port=50050,
    lan=False,
    tls=False,
    address="127.0.0.1",
    blob_port=8090,
)
LAN = dataclasses.replace(SITE, bind="0.0.0.0", lan=True, tls=True, address="192.168.7.5", node_name="attic")


def test_every_setting_we_decide_is_one_the_role_has() -> None:
    for site in (SITE, LAN):
        role_env(ControllerSettings, controller_settings(site), {})
        role_env(GatewaySettings, gateway_settings(site), {})
        role_env(WorkerSettings, worker_settings(site), {})
    with pytest.raises(KeyError, match="no such_thing"):
        role_env(WorkerSettings, {"such_thing": "1"}, {})


def test_the_roles_read_back_what_was_meant() -> None:
    controller = read_settings(
        ControllerSettings, flags={}, env=role_env(ControllerSettings, controller_settings(LAN), {})
    )
    assert controller.listen.socket == Path("/run/x/controller.sock")
    assert controller.listen.port == 0
    assert controller.listen.public_url == "https://192.168.7.5:8080"
    assert controller.bus.bus_urls == ("tls://127.0.0.1:4222",)
    assert controller.bus.bus_public_urls == ("tls://{host}:4222",)
    assert controller.access.ca_key == Path("/data/secrets/ca.key")
    assert (controller.files.blob_host, controller.files.blob_port) == ("0.0.0.0", 8090)
    assert controller.files.blob_url == "https://{host}:8090"
    assert controller.files.blob_tls_key == Path("/data/secrets/server.key")
    assert controller_settings(SITE)["blob_url"] == "http://127.0.0.1:8090"
    movable = dataclasses.replace(LAN, blob_port_moves=True)
    env = role_env(ControllerSettings, controller_settings(movable), {})
    reported = read_settings(ControllerSettings, flags={}, env=env)
    assert (reported.files.blob_port, reported.files.blob_port_moves, reported.files.blob_url) == (
        8090,
        True,
        "https://{host}:{port}",
    )
    gateway = read_settings(GatewaySettings, flags={}, env=role_env(GatewaySettings, gateway_settings(LAN), {}))
    assert (gateway.host, gateway.port) == ("0.0.0.0", 8080)
    assert gateway.tls_cert == Path("/data/secrets/server.crt")
    assert gateway.controller == "unix:/run/x/controller.sock"
    worker = read_settings(WorkerSettings, flags={}, env=role_env(WorkerSettings, worker_settings(SITE), {}))
    assert worker.node.controller == "http://127.0.0.1:8080"
    assert (worker.ingress.host, worker.ingress.port, worker.ingress.advertise) == ("127.0.0.1", 50050, "")
    assert worker.ingress.local_sockets == gateway.local_sockets == Path("/run/x")
    assert worker.node.token_file == Path("/data/secrets/worker.token")


def test_tcp_to_the_worker_can_be_chosen() -> None:
    over_tcp = dataclasses.replace(SITE, ingress_socket=False)
    environ = {"CORRAL_LOCAL_SOCKETS": "/elsewhere"}  # of a worker that was started by hand
    assert "CORRAL_LOCAL_SOCKETS" not in role_env(GatewaySettings, gateway_settings(over_tcp), environ)
    assert "CORRAL_LOCAL_SOCKETS" not in role_env(WorkerSettings, worker_settings(over_tcp), environ)


def test_a_person_may_still_set_what_up_does_not_decide() -> None:
    environ = {
        "PATH": "/bin",
        "CORRAL_STALE_AFTER": "20s",
        "CORRAL_STORE": "postgresql://x/y",
        "LOCALAI_REGISTRATION_TOKEN": "shared",
        "LOCALAI_NATS_URL": "nats://elsewhere",  # up decides where its bus is
        "CORRAL_PORT": "9999",  # up's own
        "CORRAL_KEY": "ck_mine",  # the commands' own
        "CORRAL_VRAM_BUDGET": "80%",  # the worker's
    }
    env = role_env(ControllerSettings, controller_settings(SITE), environ)
    assert env["CORRAL_STALE_AFTER"] == "20s"
    assert env["CORRAL_STORE"] == "postgresql://x/y"
    assert env["LOCALAI_REGISTRATION_TOKEN"] == "shared"
    assert env["CORRAL_PORT"] == "0"
    assert env["PATH"] == "/bin"
    assert env.keys().isdisjoint({"LOCALAI_NATS_URL", "CORRAL_KEY", "CORRAL_VRAM_BUDGET"})
    worker = role_env(WorkerSettings, worker_settings(SITE), environ)
    assert worker["CORRAL_VRAM_BUDGET"] == "80%"
    assert worker["CORRAL_PORT"] == "50050"
    assert worker.keys().isdisjoint({"LOCALAI_REGISTRATION_TOKEN", "LOCALAI_NATS_URL", "CORRAL_STORE"})


def test_no_secret_is_on_a_command_line_or_in_the_environment() -> None:
    spec = role_child("controller", ControllerSettings, controller_settings(LAN), {}, stop_timeout_s=1.0)
    assert spec.command[-3:] == ("-m", "corral.cli.main", "controller")
    assert spec.env["CORRAL_ADMIN_KEY_FILE"] == "/data/secrets/admin.key"
    assert "CORRAL_TOKEN" not in role_env(WorkerSettings, worker_settings(LAN), {})


@pytest.mark.parametrize(
    ("host", "lan", "plain", "bind", "tls"),
    [
        ("", False, False, "127.0.0.1", False),
        ("", True, False, "0.0.0.0", True),
        ("", True, True, "0.0.0.0", False),
        ("192.168.7.5", False, False, "192.168.7.5", True),  # off loopback means TLS, said or not
        ("192.168.7.5", False, True, "192.168.7.5", False),
        ("0.0.0.0", False, False, "0.0.0.0", True),
        ("localhost", False, False, "localhost", False),
        ("::1", False, False, "::1", False),
    ],
)
def test_nothing_off_loopback_is_plain_unless_somebody_says_so(
    host: str, lan: bool, plain: bool, bind: str, tls: bool
) -> None:
    settings = UpSettings(host=host, lan=lan, plain=plain)
    assert (settings.bind, settings.tls) == (bind, tls)


def test_settings_that_contradict_each_other() -> None:
    with pytest.raises(BadSettings, match="--plain"):
        UpSettings(plain=True)
    with pytest.raises(BadSettings, match="must differ"):
        UpSettings(port=4222, bus_port=4222)
    UpSettings(port=4222)  # the bus moves
    UpSettings(port=50050, worker=False)
    UpSettings(port=0, bus_port=0, ingress_port=0)


def test_the_greeting_shows_the_key_only_when_asked() -> None:
    shown = "\n".join(ready_message(SITE, join_command="corral join x", key="ck_secret"))
    service = ready_message(LAN, join_command="", key=None)
    assert service[-1] == "To join another machine: `corral token create`"
    hidden = "\n".join(ready_message(LAN, join_command="corral join x", key=None))
    assert "ck_secret" in shown
    assert "http://127.0.0.1:8080/" in shown
    assert "/data/secrets/admin.key" in hidden
    assert "https://192.168.7.5:8080/" in hidden
    assert "  corral join x" in hidden


def test_the_run_folder_is_short_and_the_same_each_time(short_folder: Path) -> None:
    deep = short_folder / ("x" * 200)
    first = run_folder(deep, {"XDG_RUNTIME_DIR": str(short_folder)})
    assert first == run_folder(deep, {"XDG_RUNTIME_DIR": str(short_folder)})
    assert first.parent == short_folder
    assert run_folder(short_folder, {"XDG_RUNTIME_DIR": str(short_folder)}) != first
    for env in ({}, {"XDG_RUNTIME_DIR": str(deep)}, {"XDG_RUNTIME_DIR": "/no/such/folder"}):
        assert str(run_folder(deep, env, uid=7)).startswith("/tmp/corral-7-")


def test_the_run_folder_has_room_for_the_socket_of_a_worker(short_folder: Path) -> None:
    for length in (20, 30, 40, 60):
        runtime = short_folder / ("r" * (length - len(str(short_folder)) - 1))
        runtime.mkdir()
        assert check_socket_folder(run_folder(short_folder, {"XDG_RUNTIME_DIR": str(runtime)})) is None
