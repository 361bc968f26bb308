"""The mock, on both protocols, as an installed folder: started, loaded, called, and caught at what it does wrong."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from corral.contract import backend_pb2 as pb
from corral.contract.backend_pb2_grpc import BackendStub
from corral.contract.manifest import LOCALAI, check_manifest
from corral.contract.messages.models import StopModel, UnloadModel
from corral.kit.errors import Invalid
from corral.worker.localai.models import list_running, stop_model, unload_model
from corral.worker.supervisor.readiness import StartFailed
from corral.worker.supervisor.spec import ProcessSpec
from corral.worker.supervisor.supervisor import Supervisor
from corral.worker.supervisor.table import Running
from tests.support.processes import alive
from tests.support.supervising import MOCK, get, mock_grpc, mock_manifest, mock_openai
from tests.support.waiting import until

LOAD = json.dumps({"Model": "m", "ContextSize": 2048})


@asynccontextmanager
async def calling(running: Running) -> AsyncIterator[BackendStub]:
    async with grpc.aio.insecure_channel(running.address) as channel, asyncio.timeout(20):
        yield BackendStub(channel)


def bearer(running: Running) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {running.token}"),)


async def test_installed_as_a_folder_it_runs_from_its_copy_and_leaves_it_as_it_was(
    supervisor: Supervisor, tmp_path: Path
) -> None:
    check_manifest(mock_manifest())
    copy = tmp_path / "versions" / "sha256-abc"
    shutil.copytree(MOCK, copy)
    (copy / "VERSION").write_text("2\n")
    before = sorted(path.name for path in copy.rglob("*"))
    for number, manifest in enumerate((mock_manifest(), LOCALAI)):
        spec = ProcessSpec(backend="mock", model="m", replica=number, directory=str(copy), manifest=manifest, load=LOAD)
        running = await supervisor.start(spec)
        assert os.readlink(f"/proc/{running.pid}/cwd") == str(copy)
    assert sorted(path.name for path in copy.rglob("*")) == before
    assert [row.protocol for row in supervisor.list_processes()] == ["openai", "grpc"]


async def test_the_openai_one_answers(supervisor: Supervisor) -> None:
    running = await supervisor.start(mock_openai())
    assert running.slots == 4
    answer = await asyncio.to_thread(get, running.port, "/v1/models", token=running.token)
    assert answer["data"][0]["id"] == "m"
    with pytest.raises(OSError, match="401"):
        await asyncio.to_thread(get, running.port, "/v1/models")


async def test_the_grpc_one_has_its_model_loaded_and_wants_its_token(supervisor: Supervisor) -> None:
    running = await supervisor.start(mock_grpc(load=LOAD))
    async with calling(running) as backend:
        reply = await backend.Predict(pb.PredictOptions(Prompt="hi", ModelIdentity="m"), metadata=bearer(running))
        assert reply.message == b"mock 1: hi"
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await backend.Health(pb.HealthMessage())
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_a_restarted_grpc_process_has_its_model_again(supervisor: Supervisor) -> None:
    first = await supervisor.start(mock_grpc(load=LOAD))
    async with calling(first) as backend:
        with pytest.raises(grpc.aio.AioRpcError):
            await backend.Predict(pb.PredictOptions(Prompt="[[exit=1]]"), metadata=bearer(first))
    await until(lambda: supervisor.find_key("m#0") not in (None, first))
    second = supervisor.find_key("m#0")
    assert second is not None
    async with calling(second) as backend:
        reply = await backend.Predict(pb.PredictOptions(Prompt="back"), metadata=bearer(second))
        assert reply.message == b"mock 1: back"


@pytest.mark.parametrize(
    ("spec", "told"),
    [
        (mock_grpc(env={"MOCK_START_LINES": "3", "MOCK_CRASH_AT_START": "9"}), r"(?s)code 9.*mock start line 3"),
        (mock_openai(env={"MOCK_LOAD_FAILS": "the weights are broken"}), r"(?s)code 1.*cannot load m: the weights"),
        (
            mock_grpc(load=json.dumps({"Model": "m", "Options": ["load_fails:no such file"]})),
            r"could not load the model: LoadModel was refused: no such file",
        ),
        (mock_grpc(load=LOAD, load_timeout_s=0.5, env={"MOCK_LOAD_DELAY_S": "60"}), "LoadModel took longer than"),
        (mock_grpc(silence_s=0.8, env={"MOCK_SILENT": "1"}), r"no sign of progress for 0\.8 s"),
    ],
)
async def test_a_start_that_fails_says_why_and_leaves_nothing(
    supervisor: Supervisor, spec: ProcessSpec, told: str
) -> None:
    with pytest.raises(StartFailed, match=told):
        await supervisor.start(spec)
    assert supervisor.list_processes() == ()


async def test_options_that_are_none_are_told(supervisor: Supervisor) -> None:
    with pytest.raises(Invalid, match="not valid ModelOptions"):
        await supervisor.start(mock_grpc(load='{"NoSuchOption": 1}'))
    assert supervisor.list_processes() == ()


async def test_a_slow_start_is_waited_for(supervisor: Supervisor) -> None:
    running = await supervisor.start(
        mock_grpc(load=LOAD, env={"MOCK_START_DELAY_S": "0.5", "MOCK_LOAD_DELAY_S": "0.3"})
    )
    assert supervisor.find(running.process_id) == running


async def test_a_mock_that_ignores_sigterm_and_leaves_children_is_gone_too(supervisor: Supervisor) -> None:
    running = await supervisor.start(mock_openai(env={"MOCK_IGNORE_SIGTERM": "1", "MOCK_GRANDCHILDREN": "2"}))
    stopped = await supervisor.stop(running.process_id, grace_s=0.3)
    assert stopped.terminated
    assert not alive(running.pid)


async def test_models_running_lists_what_serves(supervisor: Supervisor) -> None:
    first = await supervisor.start(mock_grpc(model="qwen#x", replica=2, load=LOAD))
    second = await supervisor.start(mock_grpc(model=""))
    rows = [(row.model_id, row.replica_index, row.address) for row in list_running(supervisor).models]
    assert rows == [("qwen#x", 2, first.address), ("mock", 0, second.address)]
    await supervisor.stop(first.process_id)
    assert [row.model_id for row in list_running(supervisor).models] == ["mock"]


async def test_model_stop_is_exact(supervisor: Supervisor) -> None:
    def order(address: str, **more: Any) -> StopModel:
        return StopModel(model_name="m", process_key="m#0", expected_address=address, **more)

    unknown = await stop_model(supervisor, order("127.0.0.1:1"), ())
    assert (unknown.matched, unknown.terminated, unknown.error) == (False, True, "")

    running = await supervisor.start(mock_grpc(load=LOAD))
    wrong = await stop_model(supervisor, order("127.0.0.1:1"), ())
    assert (wrong.matched, wrong.terminated, wrong.address) == (True, False, running.address)
    assert "address mismatch" in wrong.error
    assert supervisor.find(running.process_id) == running

    advertised = order(f"gpu-box:{running.port}")
    assert not (await stop_model(supervisor, advertised, ())).terminated
    stopping = asyncio.create_task(stop_model(supervisor, advertised, ("gpu-box",)))
    await asyncio.sleep(0)
    second = await stop_model(supervisor, advertised, ("gpu-box",))
    assert (second.matched, second.terminated, second.error) == (True, False, "m#0 is already stopping")
    done = await stopping
    assert (done.matched, done.freed, done.terminated, done.process_key, done.error) == (True, True, True, "m#0", "")
    assert done.address == running.address


async def test_model_unload_never_frees_another_model(supervisor: Supervisor) -> None:
    mine = await supervisor.start(mock_grpc(model="mine", load=LOAD))
    other = await supervisor.start(mock_grpc(model="other", load=LOAD))

    async def is_loaded(running: Running) -> bool:
        async with calling(running) as backend:
            status = await backend.Status(pb.HealthMessage(), metadata=bearer(running))
            return status.state == pb.StatusResponse.READY

    assert (await unload_model(supervisor, UnloadModel(model_name="unknown"), ())).success
    assert await is_loaded(mine)
    assert (await unload_model(supervisor, UnloadModel(model_name="mine"), ())).success
    assert not await is_loaded(mine)
    assert await is_loaded(other)
    await unload_model(supervisor, UnloadModel(model_name="mine", address=other.address), ())
    assert not await is_loaded(other), "the address, where there is one, says which"
