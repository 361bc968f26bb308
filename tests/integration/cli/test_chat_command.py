"""`corral chat`: what is missing is brought about and shown, the answer is printed as it comes, failures say why."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pty
import re
import select
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from corral.cli.common.data_folder import lock_file
from corral.client import LocalFleet, write_local
from corral.kit.process import lock_holder
from tests.integration.cli.conftest import Corral, start
from tests.support.scripted_fleet import refused, scripted_fleet

LOAD = ("POST", "/api/models/tiny/load")
STATUS = ("GET", "/api/models/tiny/load-status")
CHAT = ("POST", "/v1/chat/completions")


def load(state: str, **more: Any) -> web.Response:
    return web.json_response({"model": "tiny", "state": state, "version": 5, **more}, status=202)


def chunk(text: str = "", ending: str | None = None, **more: Any) -> str:
    choice = {"index": 0, "delta": {"content": text} if text else {}, "finish_reason": ending}
    return "data: " + json.dumps({"object": "chat.completion.chunk", "choices": [choice], **more}) + "\n\n"


USAGE = {"prompt_tokens": 7, "completion_tokens": 2}
WHOLE = chunk("A fence") + chunk(" for horses.") + chunk(ending="stop") + chunk(usage=USAGE) + "data: [DONE]\n\n"


def answer(text: str, **headers: str) -> web.Response:
    return web.Response(text=text, headers={"Content-Type": "text/event-stream", **headers})


def asked(corral: Corral) -> dict[str, Any]:
    (body,) = [body for method, path, body in corral.fleet.calls if (method, path) == CHAT]
    assert isinstance(body, dict)
    return body


def test_a_warm_model_answers_and_nothing_else_is_said(corral: Corral) -> None:
    corral.fleet.answers |= {LOAD: load("loaded"), CHAT: answer(WHOLE)}
    ran = corral(
        "chat", "tiny", "What is a corral?", "--system", "Be brief.", "--max-tokens", "9", "--temperature", "0"
    )
    assert (ran.code, ran.out, ran.err) == (0, "A fence for horses.\n", "")
    assert asked(corral) == {
        "model": "tiny",
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is a corral?"}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": 9,
        "temperature": 0.0,
    }


def test_a_cold_model_is_loaded_first_and_that_is_told_apart_from_the_answer(corral: Corral) -> None:
    corral.fleet.answers |= {LOAD: load("installing", node="barn"), STATUS: load("loaded"), CHAT: answer(WHOLE)}
    ran = corral("chat", "tiny", "What is a corral?")
    assert (ran.code, ran.out) == (0, "A fence for horses.\n")
    assert ran.err == "tiny: installing the backend on barn\n"


def test_a_load_that_fails_says_the_real_cause(corral: Corral) -> None:
    failed = load("failed", error="llama-cpp ended with code 1\nout of memory")
    corral.fleet.answers |= {LOAD: load("loading"), STATUS: failed}
    ran = corral("chat", "tiny", "hello")
    assert (ran.code, ran.out) == (1, "")
    assert "cannot load tiny: llama-cpp ended with code 1" in ran.err
    assert "out of memory" in ran.err


def test_a_model_nobody_knows(corral: Corral) -> None:
    corral.fleet.answers[LOAD] = refused(404, "no model is called 'tiny'; did you mean tinier?", "not_found")
    ran = corral("chat", "tiny", "hello")
    assert (ran.code, ran.out, ran.err) == (1, "", "corral: no model is called 'tiny'; did you mean tinier?\n")


def test_whoever_may_only_ask_asks(corral: Corral) -> None:
    corral.fleet.answers |= {LOAD: refused(403, "only admins load models", "denied"), CHAT: answer(WHOLE)}
    assert corral("chat", "tiny", "hello").out == "A fence for horses.\n"


def test_whoever_may_only_ask_sees_the_load_and_is_asked_for_when_it_is_over(corral: Corral) -> None:
    asked: list[str] = []

    def status() -> web.Response:
        asked.append("status")
        return load("loading", node="barn", version=len(asked)) if len(asked) < 6 else load("loaded")

    def chat() -> web.Response:
        asked.append("chat")
        return refused(503, "it is being loaded", "model_loading") if asked.count("chat") == 1 else answer(WHOLE)

    corral.fleet.answers |= {LOAD: refused(403, "only admins load models", "denied"), STATUS: status, CHAT: chat}
    ran = corral("chat", "tiny", "hello")
    assert (ran.code, ran.out) == (0, "A fence for horses.\n")
    assert set(ran.err.splitlines()) == {"tiny: loading on barn"}
    assert asked.count("chat") == 2


@pytest.mark.parametrize(
    "away",
    [
        (503, "the controller restarts", "unavailable"),
        (504, "the controller kept silent for too long", "outcome_unknown"),
    ],
)
def test_a_model_that_is_there_answers_while_the_controller_is_away(corral: Corral, away: tuple[int, str, str]) -> None:
    corral.fleet.answers |= {LOAD: refused(*away), CHAT: answer(WHOLE)}
    ran = corral("chat", "tiny", "hello")
    assert (ran.code, ran.out, ran.err) == (0, "A fence for horses.\n", "")


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        (answer(chunk("A fence")), "the answer broke off"),
        (answer(chunk("A fence") + 'data: {"error": {"message": "the engine died"}}\n\n'), "the engine died"),
        (answer("data: not json\n\n"), "the answer is not in OpenAI's format"),
        (refused(503, "the model is loading", "model_loading"), "the model is loading"),
    ],
)
def test_an_answer_that_does_not_end_well(corral: Corral, reply: web.Response, words: str) -> None:
    corral.fleet.answers |= {LOAD: load("loaded"), CHAT: reply}
    ran = corral("chat", "tiny", "hello")
    assert ran.code == 1
    assert words in ran.err
    assert ran.out in ("", "A fence\n")


def test_for_scripts(corral: Corral) -> None:
    corral.fleet.answers |= {LOAD: load("loaded"), CHAT: answer(WHOLE, **{"X-Corral-Node": "barn"})}
    told = corral("chat", "tiny", "hello", "--json").json()
    assert told.pop("first_token_ms") <= told.pop("total_ms")
    assert told == {
        "model": "tiny",
        "answer": "A fence for horses.",
        "ending": "stop",
        "node": "barn",
        "prompt_tokens": 7,
        "completion_tokens": 2,
    }


def test_the_question_may_come_from_a_pipe(corral: Corral, monkeypatch: pytest.MonkeyPatch) -> None:
    corral.fleet.answers |= {LOAD: load("loaded"), CHAT: answer(WHOLE)}
    monkeypatch.setattr("sys.stdin", io.StringIO("What is\na corral?\n"))
    assert corral("chat", "tiny", "-").code == 0
    assert asked(corral)["messages"] == [{"role": "user", "content": "What is\na corral?"}]
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert "no prompt" in corral("chat", "tiny").err


def test_what_is_no_text_is_no_reason_to_break_off(corral: Corral, tmp_path: Path) -> None:
    snowman = answer(chunk("A \u2603.") + chunk(ending="stop"))
    corral.fleet.answers |= {LOAD: load("loaded"), CHAT: lambda: snowman}
    (tmp_path / "question").write_bytes(b"caf\xe9?")
    with (tmp_path / "question").open("rb") as question, (tmp_path / "answer").open("wb") as said:
        asking = start(
            corral, "chat", "tiny", "-", stdin=question, stdout=said, env={"PYTHONIOENCODING": "ascii:strict"}
        )
        assert asking.wait(60) == 0
    assert asked(corral)["messages"] == [{"role": "user", "content": "caf\ufffd?"}]
    assert (tmp_path / "answer").read_bytes() == b"A ?.\n"
    ran = corral("chat", "tiny", "caf\udce9?")
    assert (ran.code, ran.err) == (2, "corral: b'caf\\xe9?' is not UTF-8; arguments must be UTF-8\n")


def test_what_a_model_says_does_not_steer_the_terminal(corral: Corral) -> None:
    corral.fleet.answers |= {LOAD: load("loaded"), CHAT: answer(chunk("a\x1b[2J\nb") + chunk(ending="length"))}
    ran = corral("chat", "tiny", "hello")
    assert ran.out == "a\ufffd[2J\nb\n"
    assert "cut off" in ran.err


def test_a_talk_ends_at_once_when_it_is_interrupted_at_its_prompt(corral: Corral) -> None:
    corral.fleet.answers |= {LOAD: load("loaded"), CHAT: answer(WHOLE)}
    ours, theirs = pty.openpty()
    talking = start(
        corral, "chat", "tiny", stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True, preexec_fn=_own_it
    )
    os.close(theirs)
    _read_until(ours, b"\n> ")
    os.write(ours, b"What is a corral?\n")
    _read_until(ours, b"horses.\r\n> ")
    os.write(ours, b"\x03")
    assert talking.wait(60) == 130
    os.close(ours)


@pytest.mark.parametrize(
    "moment",
    [
        # In C alone, as a signal arrives: Python runs no instruction between it and the wait for a key.
        "readline.set_pre_input_hook(partial(CDLL(None)['raise'], int(signal.SIGINT)))",
        "signal.raise_signal(signal.SIGINT)",
    ],
    ids=["after the prompt is shown, before a key is waited for", "before the prompt"],
)
def test_an_interrupt_is_noticed_that_comes_before_a_key_is_waited_for(moment: str) -> None:
    words = f"""
import asyncio, readline, signal
from ctypes import CDLL
from functools import partial
from corral.cli.models.chat_terminal import LineReader

async def talk():
    reader = LineReader(None)
    {moment}
    await reader.read("> ")

try:
    asyncio.run(talk())
except KeyboardInterrupt:
    raise SystemExit(130)
"""
    ours, theirs = pty.openpty()
    talking = subprocess.Popen([sys.executable, "-c", words], stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    try:
        assert talking.wait(60) == 130
    finally:
        talking.kill()
        talking.wait()
        os.close(ours)


def test_in_a_talk_an_answer_that_is_interrupted_ends_and_the_talk_goes_on(corral: Corral) -> None:
    corral.fleet.answers[LOAD] = load("loaded")
    corral.fleet.endless = chunk("A fence for").encode()
    ours, theirs = pty.openpty()
    talking = start(
        corral, "chat", "tiny", stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True, preexec_fn=_own_it
    )
    os.close(theirs)
    _read_until(ours, b"\n> ")
    os.write(ours, b"What is a corral?\n")
    _read_until(ours, b"A fence")
    os.write(ours, b"\x03")
    _read_until(ours, b"(interrupted)\r\n> ")
    corral.fleet.endless = b""
    corral.fleet.answers[CHAT] = answer(WHOLE)
    os.write(ours, b"And a fence?\n")
    _read_until(ours, b"horses.\r\n> ")
    last = [body for method, path, body in corral.fleet.calls if (method, path) == CHAT][-1]
    assert [each["content"] for each in last["messages"]] == ["What is a corral?", "A fence for", "And a fence?"]
    os.write(ours, b"\x03")
    assert talking.wait(60) == 130
    os.close(ours)


def test_a_talk_ends_with_ctrl_d(corral: Corral) -> None:
    corral.fleet.answers[LOAD] = load("loaded")
    ours, theirs = pty.openpty()
    talking = start(corral, "chat", "tiny", stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    _read_until(ours, b"\n> ")
    os.write(ours, b"\x04")
    assert talking.wait(60) == 0
    os.close(ours)


def test_a_conversation_is_edited_saved_reset_and_remembered(corral: Corral, tmp_path: Path) -> None:
    corral.fleet.answers |= {LOAD: lambda: load("loaded"), CHAT: lambda: answer(WHOLE)}
    corral.fleet.answers["POST", "/api/models/small/load"] = lambda: load("loaded")
    ours, theirs = pty.openpty()
    talking = start(corral, "chat", "tiny", stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    saved = tmp_path / "talk.md"
    _read_until(ours, b"> ")
    for typed, shown in (
        (b"What is a corrak\x7fl?", b"horses."),
        (f"/save {saved}".encode(), b"(saved in"),
        (f"/save {saved}".encode(), b"File exists"),
        (b"/reset", b"starts again)"),
        (b"/model small", b"(small answers now)"),
        (b"/rest", b"did you mean /reset?"),
        (b"//slash", b"horses."),
    ):
        os.write(ours, typed + b"\n")
        _read_until(ours, shown, b"> ")
    os.write(ours, b"\x04")
    assert talking.wait(60) == 0
    os.close(ours)
    assert saved.read_text() == "## user\n\nWhat is a corral?\n\n## assistant\n\nA fence for horses.\n\n"
    last = [body for method, path, body in corral.fleet.calls if (method, path) == CHAT][-1]
    assert (last["model"], last["messages"]) == ("small", [{"role": "user", "content": "/slash"}])
    history = tmp_path / ".local" / "state" / "corral" / "chat-history"
    assert history.stat().st_mode & 0o777 == 0o600
    assert history.read_text().splitlines()[0] == "What is a corral?"


def test_a_gateway_that_is_just_started_again_is_waited_for(
    corral: Corral, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """`corral up` holds its folder: what it has lost comes back."""
    asked: list[Path] = []

    def holder(lock: Path) -> int | None:
        """Asked when a connection was refused."""
        asked.append(lock)
        if len(asked) == 3:
            fleet = late.enter_context(scripted_fleet(bound=door))
            fleet.answers |= {LOAD: load("loaded"), CHAT: answer(WHOLE)}
        return lock_holder(lock)

    with socket.socket() as door, contextlib.ExitStack() as late:
        door.bind(("127.0.0.1", 0))  # and does not listen yet
        url = f"http://127.0.0.1:{door.getsockname()[1]}"
        write_local(tmp_path / "config" / "local.json", LocalFleet(url=url, data=str(tmp_path)))
        monkeypatch.setenv("CORRAL_URL", url)
        ran = corral("chat", "tiny", "hello")
        assert (ran.code, ran.out) == (1, "")
        assert "is the fleet running? start it with `corral up`" in ran.err, "nobody holds the folder"

        monkeypatch.setattr("corral.cli.common.fleet_command.lock_holder", holder)
        with lock_file(tmp_path / "lock"):
            ran = corral("chat", "tiny", "hello")
    assert (ran.code, ran.out, ran.err) == (0, "A fence for horses.\n", "")
    assert asked == [tmp_path / "lock"] * 3


def _own_it() -> None:
    """In the child: a terminal sends Ctrl-C to whom it belongs."""
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def _read_until(terminal: int, words: bytes, then: bytes = b"") -> bytes:
    """`then`: what has to follow some time after them, perhaps in another piece."""
    seen, until = b"", time.monotonic() + 60
    while words not in seen or then not in seen.partition(words)[2]:
        ready, _, _ = select.select([terminal], [], [], max(0.0, until - time.monotonic()))
        assert ready, f"not seen: {words!r} {then!r} in {seen!r}"
        # Without what the editor of lines tells the terminal, such as that it accepts pasted text as a whole.
        seen = re.sub(rb"\x1b\[[?0-9;]*[a-zA-Z]\r?", b"", seen + os.read(terminal, 10_000))
    return seen
