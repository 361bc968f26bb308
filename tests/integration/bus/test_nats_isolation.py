"""Who may do what on a real server, tried from the wire with a bare client."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
from collections.abc import AsyncIterator
from urllib.parse import urlsplit

import pytest

from corral.bus.api import Tokens
from corral.bus.auth import MintedUser
from corral.bus.jwt import sign
from corral.contract.messages.backends import INSTALL_BACKEND, InstallBackend, InstallReply
from corral.contract.messages.nodes import STOP_NODE, StopNode
from corral.kit.errors import Denied, Unreachable
from tests.support.nats import NatsServer
from tests.support.waiting import until

WAIT_S = 30.0


class Wire:
    """The NATS protocol by hand: what an attacker would type."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def line(self) -> str:
        async with asyncio.timeout(WAIT_S):
            while (line := (await self._reader.readline()).decode().strip()) == "PING":  # after two seconds, to anybody
                self._writer.write(b"PONG\r\n")
            return line

    async def say(self, *commands: str) -> list[str]:
        """Send, and return all the server says up to the answer to a PING sent behind."""
        self._writer.write("".join(f"{command}\r\n" for command in (*commands, "PING")).encode())
        said: list[str] = []
        while (line := await self.line()) not in ("PONG", ""):
            said.append(line)
        return said


@contextlib.asynccontextmanager
async def wire(server: NatsServer, user: MintedUser | None) -> AsyncIterator[Wire]:
    where = urlsplit(server.url)
    reader, writer = await asyncio.open_connection(where.hostname, where.port)
    try:
        info = json.loads((await reader.readline()).decode().removeprefix("INFO "))
        options: dict[str, object] = {"verbose": False, "lang": "by-hand", "headers": True, "no_responders": True}
        if user is not None:
            signature = base64.b64encode(sign(user.seed, info["nonce"].encode())).decode()
            options |= {"jwt": user.jwt, "sig": signature}
        writer.write(f"CONNECT {json.dumps(options)}\r\n".encode())
        yield Wire(reader, writer)
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


def is_violation(said: list[str], verb: str, subject: str) -> bool:
    return any(line.startswith(f'-ERR \'Permissions Violation for {verb} to "{subject}"') for line in said)


async def test_a_client_without_credentials_is_refused(nats_server: NatsServer) -> None:
    async with wire(nats_server, None) as stranger:
        assert await stranger.line() == "-ERR 'Authorization Violation'"


async def test_credentials_signed_by_another_account_are_refused(nats_server: NatsServer) -> None:
    foreign = nats_server.system()
    forged = MintedUser(foreign.jwt[:-8] + "AAAAAAAA", foreign.seed, foreign.public_key, "", None)
    async with wire(nats_server, forged) as stranger:
        assert await stranger.line() == "-ERR 'Authorization Violation'"


async def test_a_stolen_token_without_its_seed_is_refused(nats_server: NatsServer) -> None:
    mine, stolen = nats_server.node("a"), nats_server.node("b")
    mixed = MintedUser(stolen.jwt, mine.seed, mine.public_key, "", None)
    async with wire(nats_server, mixed) as thief:
        assert await thief.line() == "-ERR 'Authorization Violation'"


@pytest.mark.parametrize(
    "subject",
    [
        "nodes.b.>",
        "nodes.b.backend.install",
        "nodes.*.heartbeat",
        "nodes.>",
        ">",
        "_INBOX.>",
        "_INBOX_b.>",
        "_INBOX_service.>",
        "*.>",
        "corral.>",
        "$SYS.>",
    ],
)
async def test_a_node_cannot_hear_anybody_else(nats_server: NatsServer, subject: str) -> None:
    async with wire(nats_server, nats_server.node("a")) as node:
        assert is_violation(await node.say(f"SUB {subject} 1"), "Subscription", subject)
        assert "using queue" in str(await node.say(f"SUB {subject} only-me 2"))


@pytest.mark.parametrize(
    "subject",
    [
        "nodes.b.heartbeat",
        "nodes.b.load",
        "nodes.b.backend.install",
        "nodes.b.backend.install.op.progress",
        "nodes.a.backend.install",
        "nodes.a.stop",
        "_INBOX.x",
        "_INBOX_a.x",
        "_INBOX_service.x.1",
        "corral.view.changed",
        "$SYS.REQ.CLAIMS.UPDATE",
        "$SYS.REQ.SERVER.PING",
    ],
)
async def test_a_node_cannot_speak_for_anybody_else(nats_server: NatsServer, subject: str) -> None:
    async with wire(nats_server, nats_server.node("a")) as node:
        assert is_violation(await node.say(f"PUB {subject} 2\r\n{{}}"), "Publish", subject)


async def test_a_node_hears_and_speaks_what_is_its_own(nats_server: NatsServer) -> None:
    async with wire(nats_server, nats_server.node("a")) as node:
        assert await node.say("SUB nodes.a.> 1", "SUB _INBOX_a.x.* 2", "SUB nodes.a.backend.stop only-a 3") == []
        own = (
            "heartbeat",
            "load",
            "backend.install.op.progress",
            "backend.upgrade.op.result",
            "replica.start.op.result",
        )
        for subject in own:
            assert await node.say(f"PUB nodes.a.{subject} 2\r\n{{}}") == []


@pytest.mark.parametrize("localai", [False, True])
async def test_a_node_cannot_grant_itself_the_right_to_answer_elsewhere(nats_server: NatsServer, localai: bool) -> None:
    """The server lets a client answer on the reply subject of whatever it delivers, and who publishes chooses that
    subject. So nothing a node says may come back to it: it would name another node's order as the reply."""
    mine = nats_server.node("a", localai=localai)
    said_subject = "nodes.a.backend.install.op.progress"  # allowed to both kinds
    async with wire(nats_server, nats_server.node("b")) as victim, wire(nats_server, mine) as node:
        assert await victim.say("SUB nodes.b.> 1") == []
        assert await node.say("SUB nodes.a.> 1") == []
        for own in (said_subject, "nodes.a.backend.*.*.progress", "nodes.a.backend.install.*.progress"):
            await node.say(f"SUB {own} 2", f"SUB {own} a-group 3")
        for target in ("nodes.b.backend.install", "nodes.b.stop", "corral.view.changed", "_INBOX_service.x.1"):
            await node.say(f"PUB {said_subject} {target} 2\r\n{{}}")
            assert is_violation(await node.say(f"PUB {target} 4\r\nevil"), "Publish", target)
        assert await victim.say() == []


async def test_a_node_answers_once_where_it_was_asked_and_nowhere_else(nats_server: NatsServer) -> None:
    """`allow_responses` instead of a right to publish into inboxes."""
    service = nats_server.service()
    async with wire(nats_server, service) as controller, wire(nats_server, nats_server.node("a")) as node:
        assert await controller.say("SUB _INBOX_service.x.* 1") == []
        assert await node.say("SUB nodes.a.backend.list 1") == []
        assert await controller.say("PUB nodes.a.backend.list _INBOX_service.x.7 2\r\n{}") == []
        said = await node.say()
        assert said[0] == "MSG nodes.a.backend.list 1 _INBOX_service.x.7 2"
        assert is_violation(await node.say("PUB _INBOX_service.x.8 2\r\nno"), "Publish", "_INBOX_service.x.8")
        assert await node.say("PUB _INBOX_service.x.7 2\r\nok") == []
        assert await controller.say() == ["MSG _INBOX_service.x.7 1 2", "ok"]
        assert is_violation(await node.say("PUB _INBOX_service.x.7 2\r\nok"), "Publish", "_INBOX_service.x.7")


async def test_a_localai_worker_answers_calls_without_any_inbox(nats_server: NatsServer) -> None:
    """What nats.go does to answer (publish to the reply subject) works by `allow_responses` alone."""
    worker = nats_server.node("w", localai=True)
    async with nats_server.bus(nats_server.service()) as controller, wire(nats_server, worker) as node:
        await controller.wait_connected(WAIT_S)
        assert await node.say("SUB nodes.w.backend.install 1") == []
        order = asyncio.create_task(
            controller.call(INSTALL_BACKEND, InstallBackend(backend="vllm"), timeout_s=WAIT_S, node="w")
        )
        header = await node.line()
        assert header.startswith("MSG nodes.w.backend.install 1 _INBOX_service.")
        assert await node.line() == '{"backend":"vllm"}'
        reply_to = header.split()[3]
        answer = '{"success":true,"address":"w:50052"}'
        assert await node.say(f"PUB {reply_to} {len(answer)}\r\n{answer}") == []
        assert await order == InstallReply(success=True, address="w:50052")
        progress = "nodes.w.backend.install.op1.progress"
        assert await node.say(f"PUB {progress} 2\r\n{{}}") == []
        assert is_violation(await node.say("SUB _INBOX.> 9"), "Subscription", "_INBOX.>")
        assert is_violation(await node.say("PUB _INBOX.x 2\r\n{}"), "Publish", "_INBOX.x")
        assert is_violation(await node.say("PUB nodes.w.heartbeat 2\r\n{}"), "Publish", "nodes.w.heartbeat")


async def test_a_gateway_only_listens(nats_server: NatsServer) -> None:
    async with wire(nats_server, nats_server.gateway("g1")) as gateway:
        assert await gateway.say("SUB corral.view.> 1", "SUB nodes.*.load 2", "SUB _INBOX_gateway-g1.x 3") == []
        for subject in ("nodes.*.heartbeat", "nodes.a.>", "_INBOX_gateway-g2.>", "corral.>"):
            assert is_violation(await gateway.say(f"SUB {subject} 4"), "Subscription", subject)
        for subject in ("corral.view.changed", "nodes.a.load", "_INBOX_gateway-g1.x", "x"):
            assert is_violation(await gateway.say(f"PUB {subject} 2\r\n{{}}"), "Publish", subject)


async def test_controllers_have_nothing_to_do_with_the_servers_own_account(nats_server: NatsServer) -> None:
    async with wire(nats_server, nats_server.service()) as controller:
        assert await controller.say("SUB nodes.> 1", "SUB corral.> 2", "SUB _INBOX_service.x.* 3") == []
        for subject in ("$SYS.REQ.CLAIMS.UPDATE", "$SYS.REQ.SERVER.PING"):
            assert is_violation(await controller.say(f"PUB {subject} 2\r\n{{}}"), "Publish", subject)
        assert is_violation(await controller.say("SUB $SYS.> 4"), "Subscription", "$SYS.>")


async def test_the_system_user_may_only_push_and_look_up_accounts(nats_server: NatsServer) -> None:
    async with wire(nats_server, nats_server.system()) as system:
        for subject in ("$SYS.REQ.SERVER.PING", "$SYS.REQ.CLAIMS.DELETE", "nodes.a.stop"):
            assert is_violation(await system.say(f"PUB {subject} 2\r\n{{}}"), "Publish", subject)
        assert is_violation(await system.say("SUB $SYS.> 4"), "Subscription", "$SYS.>")


async def test_a_request_that_wants_its_answer_outside_an_inbox_gets_none(nats_server: NatsServer) -> None:
    """Whoever asks chooses the reply subject. A controller that answers must not be made to order nodes about."""
    ordered: list[str] = []
    asked = asyncio.Event()

    async def serve(request: InstallBackend, tokens: Tokens) -> InstallReply:
        asked.set()
        return InstallReply(success=True)

    async def hear(payload: bytes, tokens: Tokens) -> None:
        ordered.append(tokens["node"])

    async with nats_server.bus(nats_server.service()) as controller, nats_server.bus(nats_server.node("v")) as victim:
        await controller.wait_connected(WAIT_S)
        await victim.wait_connected(WAIT_S)
        await controller.serve(INSTALL_BACKEND, serve, node="c")
        await victim.subscribe_bytes(STOP_NODE, hear, node="v")
        async with wire(nats_server, nats_server.service()) as attacker:
            await attacker.say("PUB nodes.c.backend.install nodes.v.stop 2\r\n{}")
            await asked.wait()
        # A later message on the same way proves that the forged one would have arrived by now.
        await controller.call(INSTALL_BACKEND, InstallBackend(), timeout_s=WAIT_S, node="c")
        await controller.publish(STOP_NODE, StopNode(), node="v")
        await until(lambda: ordered, "the honest message")
        assert ordered == ["v"]


async def test_our_own_bus_tells_the_caller_what_it_may_not(nats_server: NatsServer) -> None:
    async def serve(request: InstallBackend, tokens: Tokens) -> InstallReply:
        return InstallReply(success=True)

    async with nats_server.bus(nats_server.node("a")) as a, nats_server.bus(nats_server.node("b")) as b:
        await a.wait_connected(WAIT_S)
        await b.wait_connected(WAIT_S)
        await b.serve(INSTALL_BACKEND, serve, node="b")
        with pytest.raises(Denied):
            await a.serve(INSTALL_BACKEND, serve, node="b")
        with pytest.raises(Denied):
            await a.call(INSTALL_BACKEND, InstallBackend(), timeout_s=WAIT_S, node="b")
        assert a.connected
        async with nats_server.bus(nats_server.service()) as controller:
            await controller.wait_connected(WAIT_S)
            with pytest.raises(Unreachable):  # the denied subscription is no responder
                await controller.call(INSTALL_BACKEND, InstallBackend(), timeout_s=WAIT_S, node="a")
