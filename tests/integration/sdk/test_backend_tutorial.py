"""The code on the page docs/how-to/write-a-backend.md runs as it stands there, on both protocols."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc.aio
import msgspec
import pytest
import yaml

from corral.contract import backend_pb2 as pb
from corral.contract.backend_pb2_grpc import BackendStub
from corral.contract.manifest import Manifest, check_manifest
from corral.contract.messages.replicas import StartReplica
from corral.contract.models import read_definition
from corral.sdk import Backend, Chat, ToolCall
from corral.sdk.backend import pieces
from corral.worker.agent.orders.replica_spec import spec_of
from corral.worker.installer.inventory import InstalledBackend
from corral.worker.installer.records import VersionRecord
from corral.worker.supervisor.spec import ProcessSpec
from tests.integration.sdk.conftest import TOKEN, Run
from tests.integration.sdk.test_http_server import ask, say
from tests.support.ingress_with_backends import open_site
from tests.support.supervising import ROOT, make_supervisor, swept
from tests.support.waiting import wait_for

PAGE = (ROOT / "docs" / "how-to" / "write-a-backend.md").read_text()


def block(language: str, number: int = 0) -> str:
    return str(re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)[number])


@pytest.fixture
def parrot(tmp_path: Path) -> Path:
    path = tmp_path / "parrot" / "parrot.py"
    path.parent.mkdir()
    path.write_text(block("python"))
    return path


def test_it_is_twenty_lines() -> None:
    code = [line for line in block("python").splitlines() if line.strip() and not line.startswith("#")]
    assert len(code) <= 20


def test_over_http(run: Run, parrot: Path) -> None:
    _, port = run("--http", "--model", "parrot", program=parrot)
    wait_for(lambda: ask(port, "/health")[0] == 200, "health")
    status, answer = ask(port, "/v1/chat/completions", say("hello"))
    assert (status, answer["choices"][0]["message"]["content"]) == (200, "You said: hello ")
    assert ask(port, "/v1/chat/completions", say(""))[0] == 400
    assert ask(port, "/v1/embeddings", {"input": "x"})[0] == 501


async def test_over_grpc(run: Run, parrot: Path) -> None:
    _, port = await asyncio.to_thread(run, "--addr", program=parrot)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        backend = BackendStub(channel)
        authorized = (("authorization", f"Bearer {TOKEN}"),)
        options = pb.ModelOptions(Model="parrot", Options=["greeting:Polly says:"])
        assert (await backend.LoadModel(options, metadata=authorized)).success
        stream = backend.PredictStream(pb.PredictOptions(Prompt="hi"), metadata=authorized)
        assert b"".join([reply.message async for reply in stream]) == b"Polly says: hi "


async def test_under_the_page_s_manifest(parrot: Path, tmp_path: Path) -> None:
    (entry,) = yaml.safe_load(block("yaml"))
    manifest = msgspec.convert(entry["corral"], Manifest)
    check_manifest(manifest)
    with swept(tmp_path / "processes"):
        async with make_supervisor(tmp_path / "processes") as supervisor:
            spec = ProcessSpec(backend="parrot", model="polly", directory=str(parrot.parent), manifest=manifest)
            running = await supervisor.start(spec)
            assert running.slots == 4
            answer = await asyncio.to_thread(ask, running.port, "/v1/chat/completions", say("hello"), running.token)
            assert answer[1]["choices"][0]["message"]["content"] == "You said: hello "
            await supervisor.stop_all()


async def test_over_grpc_it_answers_as_over_http(parrot: Path, tmp_path: Path) -> None:
    """With the page's own words for the manifest and the model."""
    found = re.search(r"`protocol: grpc` and `command: (\[.*?\])`", PAGE)
    assert found is not None
    manifest = Manifest(protocol="grpc", command=tuple(yaml.safe_load(found.group(1))))
    check_manifest(manifest)
    definition = yaml.safe_load(block("yaml", 1))
    build = InstalledBackend("parrot", parrot.parent, manifest, record=VersionRecord(id="v", digest="sha256:1"))
    order = StartReplica(
        op_id="op",
        attempt=1,
        process_id="p",
        model=read_definition(definition).name,
        replica=0,
        backend=definition["backend"],
        definition=definition,
    )
    async with open_site(tmp_path) as site:
        running = await site.supervisor.start(spec_of(order, build, tmp_path))
        path = f"/replicas/{running.process_id}/v1/chat/completions"
        status, answer = await site.ask(path, method="POST", body=say("hello"))
        assert (status, answer["choices"][0]["message"]["content"]) == (200, "Polly says: hello ")
        assert (await site.ask(path, method="POST", body=say("")))[0] == 400
        status, answer = await site.ask(
            f"/replicas/{running.process_id}/v1/embeddings", method="POST", body={"input": "x"}
        )
        assert (status, answer["error"]["message"]) == (
            501,
            "The backend parrot does not implement Embedding: use a model whose backend does.",
        )


async def test_the_page_s_tool_call(tmp_path: Path) -> None:
    scope: dict[str, Any] = {"ToolCall": ToolCall}
    exec("async def generate(chat):\n    " + "    ".join(block("python", 1).splitlines(keepends=True)), scope)

    class Caller(Backend):
        def generate(self, chat: Chat) -> AsyncIterator[ToolCall]:
            found: AsyncIterator[ToolCall] = scope["generate"](chat)
            return found

    calls = [piece async for piece in pieces(Caller(), Chat()) if isinstance(piece, ToolCall)]
    assert calls[0].name == "get_weather"
    assert "".join(call.arguments for call in calls) == '{"city": "Rome"}'
