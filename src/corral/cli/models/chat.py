"""`corral chat MODEL ["prompt"]`: sends a prompt and streams the answer; loads the model first if necessary."""

from __future__ import annotations

import asyncio
import io
import os
import signal
import sys
import time
from typing import TYPE_CHECKING, Annotated, Any

from corral.cli.common import declare
from corral.cli.common.fleet_command import fleet_command
from corral.cli.common.options import Json
from corral.cli.common.output import DONE, FAILED, print_error, print_json, print_note, printable
from corral.cli.models.load_progress import LoadProgress, LoadWatcher
from corral.contract.loads import LoadState, LoadStatus
from corral.kit.errors import CorralError, Denied, Invalid, OutcomeUnknown, Unavailable
from corral.kit.tasks import wait_readable

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Coroutine

    from corral.client import Client
    from corral.client.chat import ChatPiece

app = declare.App()
_NODE_HEADERS = ("x-corral-node", "x-localai-node")


@app.command("chat")
@fleet_command
async def chat(
    client: Client,
    model: Annotated[str, declare.Argument(metavar="MODEL", help="name of the model")],
    prompt: Annotated[
        str,
        declare.Argument(metavar="PROMPT", help="the prompt; - reads stdin; without a prompt, a conversation"),
    ] = "",
    system: Annotated[str, declare.Option("--system", metavar="TEXT", help="system message")] = "",
    max_tokens: Annotated[
        int, declare.Option("--max-tokens", metavar="N", min=0, help="maximum length of the answer; 0 for no limit")
    ] = 0,
    temperature: Annotated[
        float | None,
        declare.Option(
            "--temperature", metavar="T", min=0, max=2, help="sampling temperature; without it, that of the model"
        ),
    ] = None,
    as_json: Json = False,
) -> int:
    """Send a prompt to a model and print the answer.

    A model that is not loaded is loaded first: the backend is installed, the files are fetched, a replica is started.

    \b
    Examples:
      corral chat smollm2-135m "What is a corral?"
      corral chat smollm2-135m                      a conversation; Ctrl-C stops an answer, Ctrl-D ends it
      git diff | corral chat smollm2-135m - --system "Write a commit message."
    """
    options: dict[str, Any] = {}
    if max_tokens:
        options["max_tokens"] = max_tokens
    if temperature is not None:
        options["temperature"] = temperature
    return await send(client, model, prompt, system=system, options=options, as_json=as_json)


async def send(
    client: Client,
    model: str,
    prompt: str,
    *,
    system: str = "",
    options: dict[str, Any] | None = None,
    as_json: bool = False,
) -> int:
    """Ask one question, or talk on the terminal. Return the exit code."""
    conversation = _Conversation(client, model, system, options or {})
    question = _question(prompt)
    if question is None and as_json:
        raise declare.BadParameter("--json needs a prompt")
    if not await conversation.load():
        return FAILED
    if question is not None:
        return await conversation.ask(question, as_json=as_json)
    return await _converse(conversation)


def _question(prompt: str) -> str | None:
    """The prompt, or None for a conversation on the terminal."""
    if prompt == "-" or (not prompt and not sys.stdin.isatty()):
        if isinstance(sys.stdin, io.TextIOWrapper):
            # Bytes that are not UTF-8 (in a diff of an old file, for example) are replaced; the model reads the rest.
            sys.stdin.reconfigure(errors="replace")
        prompt = sys.stdin.read().strip()
        if not prompt:
            raise Invalid("no prompt: stdin is empty")
    return prompt or None


async def _converse(conversation: _Conversation) -> int:
    print_note("Type a prompt and press Enter. Ctrl-C stops an answer, Ctrl-D ends the conversation.")
    while True:
        try:
            line = await _read_line("> ")
        except EOFError:
            print_note("")
            return DONE
        if line.strip():
            await _cancel_on_interrupt(conversation.ask(line.strip()))


async def _cancel_on_interrupt(asking: Coroutine[Any, Any, int]) -> None:
    """Wait for an answer. Ctrl-C stops the answer, not the conversation."""
    loop, answering = asyncio.get_running_loop(), asyncio.ensure_future(asking)
    loop.add_signal_handler(signal.SIGINT, answering.cancel)
    try:
        await asyncio.wait((answering,))
    finally:
        loop.remove_signal_handler(signal.SIGINT)
        answering.cancel()  # when the command itself is cancelled
    if answering.cancelled():
        print_note("\n(interrupted)")
    else:
        answering.result()


async def _read_line(prompt: str) -> str:
    """Read a line from the terminal without a thread: a thread that waits for input cannot be stopped, and Ctrl-C would
    have no effect. Raises EOFError."""
    print(prompt, end="", file=sys.stderr, flush=True)
    terminal, typed = sys.stdin.fileno(), b""
    while not typed.endswith(b"\n"):
        await wait_readable(terminal)
        piece = os.read(terminal, 65536)
        if not piece and not typed:
            raise EOFError
        if not piece:  # Ctrl-D after some text ends the line
            break
        typed += piece
    return typed.decode(errors="replace")


class _Conversation:
    def __init__(self, client: Client, model: str, system: str, options: dict[str, Any]) -> None:
        self._client = client
        self._model = model
        self._options = options
        self._messages: list[dict[str, str]] = [{"role": "system", "content": system}] if system else []

    async def load(self) -> bool:
        """Load the model. False if that failed. True for a key that may not load: its request loads the model.
        True also when the controller cannot be reached: a loaded model still answers."""
        try:
            begun = await self._client.loads.ask(self._model)
        except (Denied, Unavailable, OutcomeUnknown):
            return True
        status = await self._follow(begun)
        if status.state == LoadState.FAILED:
            print_error(f"cannot load {self._model}: {status.error or 'no reason was reported'}")
            print_note(f"See `corral why model {self._model}`.")
            return False
        return True

    async def _answer(self, head: list[tuple[str, str]]) -> AsyncGenerator[ChatPiece, None]:
        """Stream the answer. A request that the gateway could not hold until the model was loaded is sent again."""
        from corral.client.chat import chat as stream

        while True:
            begun = False
            try:
                async with LoadWatcher(self._client, self._model) as load:
                    async for said in stream(
                        self._client, self._model, self._messages, options=self._options, head=head
                    ):
                        begun = True
                        await load.stop()
                        yield said
                return
            except Unavailable:
                if begun or not await self._becomes_ready():
                    raise

    async def _becomes_ready(self) -> bool:
        """Follow a load that is in progress. False if there is none, or if it failed."""
        found = await self._client.loads.find(self._model)
        return found is not None and (await self._follow(found)).state == LoadState.LOADED

    async def _follow(self, status: LoadStatus) -> LoadStatus:
        """Show the progress of a load until it ends; return its last status."""
        with LoadProgress() as progress:
            async for latest in self._client.loads.follow(status):
                progress.show(latest)
        return latest

    async def ask(self, question: str, *, as_json: bool = False) -> int:
        from corral.client.chat import ChatPiece

        self._messages.append({"role": "user", "content": question})
        head: list[tuple[str, str]] = []
        answer: list[str] = []
        began, first = time.monotonic(), 0.0
        last = ChatPiece()
        try:
            async for said in self._answer(head):
                first = first or time.monotonic() - began
                last = said
                answer.append(said.text)
                if said.text and not as_json:
                    print(_shown(said.text), end="", flush=True)
        except asyncio.CancelledError:  # the conversation continues with the part that was received
            if answer:
                self._messages.append({"role": "assistant", "content": "".join(answer)})
            else:
                self._messages.pop()
            raise
        except CorralError as error:
            if answer and not as_json:
                print(flush=True)
            print_error(error.message)
            self._messages.pop()
            return FAILED
        whole = "".join(answer)
        self._messages.append({"role": "assistant", "content": whole})
        seconds = time.monotonic() - began
        if as_json:
            print_json(
                {
                    "model": self._model,
                    "answer": whole,
                    "ending": last.ending,
                    "node": _node_of(head),
                    "prompt_tokens": last.prompt_tokens,
                    "completion_tokens": last.completion_tokens,
                    "first_token_ms": round(first * 1000),
                    "total_ms": round(seconds * 1000),
                }
            )
            return DONE
        if not whole.endswith("\n"):
            print(flush=True)
        if last.ending == "length":
            print_note("(the answer was cut off at the token limit)")
        return DONE


def _node_of(head: list[tuple[str, str]]) -> str:
    return next((value for name, value in head if name.lower() in _NODE_HEADERS), "")


def _shown(text: str) -> str:
    """The text with its line breaks, but without characters that control the terminal."""
    return "\n".join(printable(line.replace("\t", "    ")) for line in text.split("\n"))
