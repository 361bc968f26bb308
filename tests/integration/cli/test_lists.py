"""Lists are printed by `cli/lists.py` where it can, else by the whole command: both print the same."""

from __future__ import annotations

import ssl
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web

from corral.cli.lists import print_list
from corral.cli.run import run
from corral.contract.admin import NodeView, OperationList, OperationNodeView, OperationView
from corral.contract.catalogue import ModelView, ScheduleView
from corral.contract.hardware import Device
from corral.contract.receipts import RequestList, RequestView
from corral.kit.certificates import Ca, make_ca
from tests.integration.cli.conftest import Corral
from tests.support.scripted_fleet import node, refused, scripted_fleet

LISTS = [("nodes", "list"), ("models", "list"), ("models", "replicas"), ("ps",), ("ops", "list"), ("requests",)]
PATHS = {"nodes": "/api/nodes", "models": "/api/models", "ops": "/api/operations", "requests": "/api/requests"}
STAMP = "2026-11-15T12:00:00Z"
EVERYTHING: dict[str, Any] = {
    "nodes": (
        NodeView(id="n1", name="attic", status="healthy", total_ram=2**34, available_ram=2**33, last_heartbeat=STAMP),
        NodeView(id="n2", name="cellar", status="pending", labels={"tier": "fast"}, compat=True),
        NodeView(
            id="n3", name="機械室", status="offline", status_reason="silent\x1b[2J", devices=(Device(name="A100"),)
        ),
    ),
    "models": (
        ModelView(id="m", backend="llama-cpp", ready=1, tags=("chat",), source="gallery@m", pinned=True),
        ModelView(
            id="n", backend="vllm", size_bytes=2**30, schedule=ScheduleView(min_replicas=1, min_prefix_match=0.5)
        ),
    ),
    "ops": OperationList(
        (
            OperationView(
                job_id="0123456789",
                kind="install",
                backend="vllm",
                scope="all",
                state="failing",
                progress=40,
                created_at=STAMP,
                nodes=(
                    OperationNodeView(node_name="attic", status="error", error="no space", next_retry_at=STAMP),
                    OperationNodeView(node_name="shed", status="success", percentage=100.0, sources={"controller": 7}),
                ),
            ),
            OperationView(job_id="abcdefghij", kind="delete", backend="x", scope="node", counts={"success": 3}),
        )
    ),
    "requests": RequestList(
        (
            msgspec.convert(
                {field.name: field.type() for field in msgspec.structs.fields(RequestView) if field.required}
                | {"at": STAMP, "model": "m", "status": 503, "total_ms": 12.5, "error": "no node", "tries": 2},
                RequestView,
            ),
        )
    ),
}


def answer(corral: Corral, noun: str, make: Callable[[], web.Response]) -> None:
    corral.fleet.answers["GET", PATHS[noun]] = make


@pytest.fixture
def full(corral: Corral) -> Corral:
    for noun, found in EVERYTHING.items():
        body = msgspec.json.encode(found)
        answer(corral, noun, lambda body=body: web.Response(body=body))  # type: ignore[misc]
    corral.fleet.replicas = [
        {"model_name": "m", "node_name": "attic", "replica_index": 0, "state": "loaded", "memory_bytes": 2**30},
        {"model_name": "n", "node_id": "n2", "state": "loading", "devices": [0, 1], "error": "one\ntwo\nthree"},
    ]
    return corral


@pytest.mark.parametrize("words", LISTS, ids=" ".join)
@pytest.mark.parametrize("more", [(), ("--json",)], ids=["table", "json"])
@pytest.mark.parametrize("state", ["full", "empty"])
def test_the_whole_command_prints_the_same(
    request: pytest.FixtureRequest,
    capsys: pytest.CaptureFixture[str],
    words: tuple[str, ...],
    more: tuple[str, ...],
    state: str,
) -> None:
    corral: Corral = request.getfixturevalue("full" if state == "full" else "corral")
    if state == "empty":
        corral.fleet.nodes = []
    assert print_list([*words, *more]) == 0
    short, calls = capsys.readouterr(), list(corral.fleet.calls)
    corral.fleet.calls.clear()
    assert run([*words, *more]) == 0
    whole = capsys.readouterr()
    assert (short.out, short.err) == (whole.out, whole.err)
    assert calls == corral.fleet.calls
    assert (state == "full") == (len(short.out.splitlines()) > 1)


@pytest.mark.parametrize(
    "words",
    [
        ("nodes", "list", "--status", "pending"),
        ("ops", "list", "--all"),
        ("requests", "--failed"),
        ("requests", "--model", "m & n/ü", "--by", "me", "--node", "attic"),
    ],
    ids=" ".join,
)
@pytest.mark.parametrize("more", [(), ("--json",)], ids=["table", "json"])
def test_the_usual_options_are_the_same(
    full: Corral, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], more: tuple[str, ...]
) -> None:
    assert print_list([*words, *more]) == 0
    short, queries = capsys.readouterr(), list(full.fleet.queries)
    full.fleet.queries.clear()
    assert run([*words, *more]) == 0
    whole = capsys.readouterr()
    assert (short.out, short.err) == (whole.out, whole.err)
    assert queries == full.fleet.queries
    assert len(short.out.splitlines()) > 1


@pytest.mark.parametrize(
    "words",
    [
        ("nodes", "list", "--status", "draining"),  # no such node
        ("nodes", "list", "--status", "nonsense"),
        ("nodes", "list", "--watch"),
        ("requests", "--model"),
        ("requests", "--since", "5m"),
        ("models", "list", "--all"),
    ],
    ids=" ".join,
)
def test_other_options_and_empty_results_are_left_to_the_whole_command(full: Corral, words: tuple[str, ...]) -> None:
    assert print_list(words) is None


def test_the_overview_is_the_same(full: Corral, capsys: pytest.CaptureFixture[str]) -> None:
    assert print_list([]) == 0
    short, full_calls = capsys.readouterr(), sorted(path for _, path, _ in full.fleet.calls)
    full.fleet.calls.clear()
    answer(full, "ops", lambda: refused(503, "starting", "unavailable"))  # the whole client is asked for everything
    assert print_list([]) == 1
    assert "starting" in capsys.readouterr().err
    assert sorted(path for _, path, _ in full.fleet.calls) == sorted(full_calls * 2)
    assert "3 healthy" not in short.out
    assert "1 healthy, 1 pending, 1 offline" in short.out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("nodes", "list", "--jsn"), "--jsn"),
        (("nodes", "list", "--json", "extra"), "extra"),
        (("ops", "list", "--context"), "requires an argument"),
        (("models", "list", "--context", "nowhere"), "nowhere"),
        (("nodes", "list", "--key", "ck_wrong"), "not known"),
        (("nodes", "list", "--key", "ck_\nx"), "control character"),
        (("nodes", "list", "--url", "http://127.0.0.1:1"), "nothing answers at"),
        (("nodes", "list", "--url", "ftp://x"), "is not a URL"),
    ],
)
def test_mistakes_are_told_by_the_whole_command(full: Corral, words: tuple[str, ...], message: str) -> None:
    ran = full(*words)
    assert ran.code in (1, 2)
    assert message in ran.err
    assert ran.out == ""


@pytest.mark.parametrize(
    "body",
    [b"", b"null", b"{}", b"<html>", b'{"nodes":[]}', b"[1]", b'[{"name":7}]', b'[{"devices":[3]}]', b"[" * 100_000],
)
def test_an_answer_that_is_not_of_a_fleet_is_left_to_the_whole_command(full: Corral, body: bytes) -> None:
    answer(full, "nodes", lambda: web.Response(body=body))
    assert print_list(["nodes", "list"]) is None


def test_more_requests_than_one_page_are_read_by_the_whole_command(full: Corral) -> None:
    answer(full, "requests", lambda: web.Response(body=msgspec.json.encode(RequestList((), next="x"))))
    assert print_list(["requests"]) is None


def test_an_answer_in_chunks_is_read(full: Corral) -> None:
    def chunked() -> web.Response:
        found = web.json_response([node("attic")])
        found.enable_chunked_encoding()
        return found

    answer(full, "nodes", chunked)
    assert print_list(["nodes", "list"]) == 0


def test_over_tls_the_ca_of_the_file_is_checked(
    no_fleet: None, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = datetime.now(UTC)
    made, other = make_ca("test CA", now), make_ca("another", now)
    issued = Ca(made.certificate_pem, made.key_pem).issue_server(["127.0.0.1"], now, life=timedelta(days=1))
    (tmp_path / "server.pem").write_text(issued.certificate_pem + issued.key_pem)
    (tmp_path / "ca.pem").write_text(made.certificate_pem)
    (tmp_path / "other.pem").write_text(other.certificate_pem)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(tmp_path / "server.pem")
    with scripted_fleet(context) as fleet:
        monkeypatch.setenv("CORRAL_KEY", "ck_" + "a" * 52)
        words = ["nodes", "list", "--url", fleet.url, "--ca"]
        assert print_list([*words, str(tmp_path / "ca.pem")]) == 0
        assert "attic" in capsys.readouterr().out
        fleet.calls.clear()
        for ca in (str(tmp_path / "other.pem"), str(tmp_path / "none.pem"), "sha256:" + "ab" * 32):
            assert print_list([*words, ca]) is None
        assert fleet.calls == []  # no key was sent


@pytest.mark.parametrize("words", LISTS, ids=" ".join)
def test_lists_import_what_they_print_and_no_more(full: Corral, words: tuple[str, ...]) -> None:
    program = (
        "import sys; from corral.cli.main import main; "
        f"code = main({list(words)}); print(*sys.modules, file=sys.stderr); sys.exit(code)"
    )
    ran = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    unwanted = {
        "click",
        "asyncio",
        "msgspec",
        "dataclasses",
        "inspect",
        "ssl",
        "rich.console",
        "subprocess",
        "shutil",
        "email",
    }
    assert unwanted & set(ran.stderr.split()) == set()
