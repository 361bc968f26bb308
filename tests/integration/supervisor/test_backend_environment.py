"""What a backend finds around itself: no secret of ours, a token of its own, no way to more rights."""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from corral.contract.manifest import Manifest
from corral.contract.messages.replicas import ReplicaDevice
from corral.kit.errors import Invalid
from corral.worker.supervisor.spec import ProcessSpec
from corral.worker.supervisor.supervisor import Supervisor
from tests.support.processes import alive
from tests.support.supervising import get, identities, tiny

Open = Callable[..., Any]

WORKER = {
    "PATH": os.environ["PATH"],
    "HOME": "/home/somebody",
    "LANG": "C.UTF-8",
    "OMP_NUM_THREADS": "4",
    "HF_HOME": "/models/hf",
    "CORRAL_TOKEN": "cj_secret",
    "CORRAL_DATA": "/data",
    "LOCALAI_REGISTRATION_TOKEN": "shared secret",
    "LOCALAI_NATS_JWT": "eyJ",
    "LOCALAI_GRPC_AUTH_TOKEN": "the worker's own",
    "NATS_CREDS": "/data/creds",
    "AWS_SECRET_ACCESS_KEY": "s3",
    "HF_TOKEN": "hf_mine",
    "CUDA_SECRET": "x",
    "RANDOM_THING": "y",
}


def environment(pid: int) -> dict[str, str]:
    pairs = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
    return dict(pair.split("=", 1) for pair in pairs if pair)


def status(pid: int) -> dict[str, str]:
    rows = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {name: value.strip() for name, _, value in (row.partition(":") for row in rows)}


def open_files(pid: int) -> set[str]:
    """The line that asked whether it is ready may just be closed."""
    found = set()
    for number in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):
            found.add(os.readlink(f"/proc/{pid}/fd/{number}"))
    return found


async def test_the_environment_has_no_secret_of_ours(opened: Open, folder: Path, tmp_path: Path) -> None:
    supervisor = await opened(environ=WORKER)
    running = await supervisor.start(tiny(tmp_path / "b", env={"FROM_THE_DEFINITION": "1"}))
    env = environment(running.pid)
    assert env["LOCALAI_GRPC_AUTH_TOKEN"] == running.token
    assert {"PATH", "HOME", "LANG", "OMP_NUM_THREADS", "HF_HOME", "FROM_THE_DEFINITION"} <= set(env)
    mine = {name for name in env if name.startswith(("CORRAL_", "LOCALAI_", "NATS_"))}
    assert mine == {"LOCALAI_GRPC_AUTH_TOKEN", "CORRAL_PYTHON"}
    assert not {"AWS_SECRET_ACCESS_KEY", "HF_TOKEN", "CUDA_SECRET", "RANDOM_THING"} & set(env)
    (identity,) = identities(folder)
    assert not any(name.startswith(("CORRAL_", "LOCALAI_")) for name in environment(identity.shim_pid))


async def test_a_person_may_let_a_name_through_but_never_one_of_ours(opened: Open, tmp_path: Path) -> None:
    supervisor = await opened(environ=WORKER, env=("HF_TOKEN", "CORRAL_TOKEN"))
    env = environment((await supervisor.start(tiny(tmp_path / "b"))).pid)
    assert env["HF_TOKEN"] == "hf_mine"
    assert "CORRAL_TOKEN" not in env


async def test_every_process_has_its_own_token_and_nobody_can_set_it(supervisor: Supervisor, tmp_path: Path) -> None:
    first = await supervisor.start(tiny(tmp_path / "b", env={"LOCALAI_GRPC_AUTH_TOKEN": "known to all"}))
    second = await supervisor.start(tiny(tmp_path / "b", replica=1))
    tokens = [environment(running.pid)["LOCALAI_GRPC_AUTH_TOKEN"] for running in (first, second)]
    assert tokens == [first.token, second.token]
    assert len(set(tokens)) == 2
    assert min(map(len, tokens)) >= 32
    assert first.token not in repr(first)


async def test_the_token_is_on_disk_for_its_owner_only(supervisor: Supervisor, folder: Path, tmp_path: Path) -> None:
    running = await supervisor.start(tiny(tmp_path / "b"))
    assert os.stat(folder).st_mode & 0o777 == 0o700
    place = folder / running.process_id
    assert place.stat().st_mode & 0o777 == 0o700
    assert all(path.stat().st_mode & 0o077 == 0 for path in place.iterdir())


async def test_no_new_privileges_its_own_group_and_no_open_files_of_ours(
    supervisor: Supervisor, folder: Path, tmp_path: Path
) -> None:
    running = await supervisor.start(tiny(tmp_path / "b"))
    (identity,) = identities(folder)
    assert status(running.pid)["NoNewPrivs"] == "1"
    assert os.getpgid(running.pid) == running.pid
    assert os.getsid(running.pid) == identity.shim_pid != os.getsid(0)
    opened = open_files(running.pid)
    assert opened
    assert not [name for name in opened if str(folder) in name or "pytest" in name]
    ignored = int(status(running.pid)["SigIgn"], 16)
    assert not ignored & (1 << (signal.SIGTERM - 1))


async def test_devices_are_the_ones_placement_gave(supervisor: Supervisor, tmp_path: Path) -> None:
    devices = (ReplicaDevice(vendor="nvidia", index=1), ReplicaDevice(vendor="nvidia", index=3))
    env = environment((await supervisor.start(tiny(tmp_path / "b", devices=devices))).pid)
    assert env["CUDA_VISIBLE_DEVICES"] == "1,3"
    assert env["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can run backends as somebody else")
@pytest.mark.skipif(not os.path.exists("/usr/bin/python3"), reason="needs an interpreter everybody can run")
async def test_backends_can_run_as_another_user(opened: Open) -> None:
    supervisor = await opened(user="nobody")
    with tempfile.TemporaryDirectory() as readable:  # pytest's own folders are for root only
        os.chmod(readable, 0o755)
        spec = tiny(Path(readable))
        python = Manifest(protocol="openai", command=("/usr/bin/python3", *spec.manifest.command[1:]))
        await check_another_user(supervisor, msgspec.structs.replace(spec, manifest=python))


async def check_another_user(supervisor: Supervisor, spec: ProcessSpec) -> None:
    running = await supervisor.start(spec)
    assert status(running.pid)["Uid"].split()[0] != "0"
    assert environment(running.pid)["USER"] == "nobody"
    stopped = await supervisor.stop(running.process_id)
    assert stopped.terminated
    assert not alive(running.pid)


async def test_an_unknown_user_is_told(opened: Open, tmp_path: Path) -> None:
    supervisor = await opened(user="nobody-of-that-name")
    with pytest.raises(Invalid, match="there is no user"):
        await supervisor.start(tiny(tmp_path / "b"))


async def test_the_ready_probe_shows_the_token(supervisor: Supervisor, tmp_path: Path) -> None:
    """An openai backend may ask for it; ours do."""
    folder = tmp_path / "b"
    spec = tiny(folder)
    text = (folder / "tiny.py").read_text()
    wanted = 'if self.headers.get("Authorization") != "Bearer " + os.environ["LOCALAI_GRPC_AUTH_TOKEN"]:'
    guard = f"{wanted}\n            return self.send_error(401)\n        "
    (folder / "tiny.py").write_text(text.replace("if self.path.startswith", guard + "if self.path.startswith"))
    running = await supervisor.start(spec)
    with pytest.raises(OSError, match="401"):
        get(running.port)
    assert get(running.port, token=running.token)["pid"] == running.pid
