"""The ingress's fast path: only plainly authorized requests take it, and they are counted as on the general path."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from corral.contract.access import AccessClaims
from corral.contract.codec import encode
from corral.inference.request_files import LocalFiles
from corral.kit.signing import Signer
from corral.relay.http1.head import RequestHead, RequestHeads
from corral.worker.ingress import fast_path
from corral.worker.ingress.routes import IngressRoutes
from corral.worker.ingress.tokens import TokenVerifier
from corral.worker.metrics import WorkerMetrics
from corral.worker.status import WorkerStatus
from corral.worker.supervisor.logs import LogBook
from corral.worker.supervisor.table import Running

SIGNER = Signer(Signer.new_private_key())
SERVES = Running("p1", "k", "m", 0, "b", "r", "d", "openai", 4000, "its-own", slots=4)


class World:
    """One process and two clocks."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.running: Running | None = SERVES
        self.now = 1000.0  # on both clocks
        tokens = TokenVerifier(lambda: self.now)
        tokens.trust(SIGNER.public_key, "n1")
        self.metrics = WorkerMetrics()
        files = LocalFiles(folder)
        self.routes = IngressRoutes(WorkerStatus("boot", "n"), tokens, self.metrics, self.find, LogBook(), files)
        self.fast_path = self.routes.fast_path
        monkeypatch.setattr(fast_path, "_monotonic", lambda: self.now)

    def find(self, process_id: str) -> Running | None:
        return self.running if process_id == "p1" else None


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    return World(tmp_path, monkeypatch)


def token(*, scope: str = "replicas", node: str = "n1", exp: int = 1100) -> str:
    return SIGNER.sign(encode(AccessClaims(sub="gateway", aud=node, scope=(scope,), exp=exp)))


def head(shown: str, path: str = "/replicas/p1/v1/chat/completions?x=1") -> RequestHead:
    raw = f"POST {path} HTTP/1.1\r\nhost: h\r\nx-corral-a: b\r\nx-own: c\r\nauthorization: Bearer {shown}"
    return RequestHeads(100).parse(raw.encode())[0]


def test_a_request_for_a_process_that_serves_takes_it_and_is_counted(world: World) -> None:
    asked = head(token())
    forward = world.fast_path.decide(asked, b"{}", b"")
    assert forward is not None
    assert (forward.target.host, forward.target.port, forward.path) == ("127.0.0.1", 4000, b"/v1/chat/completions?x=1")
    assert b"authorization: Bearer its-own\r\n" in forward.wire
    assert b"x-own: c\r\n" in forward.wire
    assert b"x-corral" not in forward.wire
    assert (world.routes.in_flight.of("p1"), world.metrics.registry.get_sample_value(IN_FLIGHT)) == (1, 1.0)
    assert world.fast_path.decide(asked, b"{}", b"") is forward, "evaluated once"
    for _ in range(2):
        world.fast_path.on_response(forward, b"id", 200, 0.0, 0.1, 10, b"")
    assert (world.routes.in_flight.of("p1"), world.metrics.registry.get_sample_value(IN_FLIGHT)) == (0, 0.0)
    assert world.fast_path.ended == {200: 2}


IN_FLIGHT = "corral_worker_ingress_in_flight"


@pytest.mark.parametrize(
    "asked",
    [
        head("nonsense"),
        head(token(scope="logs")),
        head(token(node="n2")),
        head(token(exp=999)),
        head(token(), "/replicas/p2/v1/models"),
        head(token(), "/replicas/p1"),
        head(token(), "/metrics"),
        head(token() + "\r\nauthorization: Bearer another"),
    ],
    ids=["no token", "another scope", "another node", "expired", "another process", "no path", "another route", "two"],
)
def test_what_is_not_plainly_fine_is_left_to_the_door(world: World, asked: RequestHead) -> None:
    assert world.fast_path.decide(asked, b"{}", b"") is None
    assert world.routes.in_flight.total == 0


def test_it_ends_with_the_token_and_with_the_process(world: World) -> None:
    asked = head(token(exp=1100))
    assert world.fast_path.decide(asked, b"{}", b"") is not None
    world.now = 1099.9
    assert world.fast_path.decide(asked, b"{}", b"") is not None
    world.now = 1100.0
    assert world.fast_path.decide(asked, b"{}", b"") is None, "the token has expired"

    world.now = 1000.0
    asked = head(token(exp=2000))
    first = world.fast_path.decide(asked, b"{}", b"")
    assert first is not None
    world.running = None
    assert world.fast_path.decide(asked, b"{}", b"") is None, "it is gone"
    world.running = replace(SERVES, protocol="grpc")
    assert world.fast_path.decide(asked, b"{}", b"") is None, "it has to be translated"
    world.running = replace(SERVES, port=4001)
    second = world.fast_path.decide(asked, b"{}", b"")
    assert second is not None
    assert second.target.port == 4001, "never another process than the one that serves now"
