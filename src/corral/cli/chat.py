"""`corral chat MODEL ["prompt"]`: ask a model, from nothing if need be, and read along."""

from __future__ import annotations

import asyncio
import io
import os
import signal
import sys
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from corral.cli.asking import Json
from corral.cli.load_progress import LoadProgress, WhileWaiting
from corral.cli.output import DONE, FAILED, complain, plain, print_json, remark
from corral.cli.remote import remote
from corral.contract.loads import LoadState, LoadStatus
from corral.kit.errors import CorralError, Denied, Invalid, OutcomeUnknown, Unavailable

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Coroutine

    from corral.client import Client
    from corral.client.chat import Said

app = typer.Typer(rich_markup_mode=None, add_completion=False)
_NODE_HEADERS = ("x-corral-node", "x-localai-node")


@app.command("chat")
@remote
async def chat(
    client: Client,
    model: Annotated[str, typer.Argument(metavar="MODEL", help="its name", show_default=False)],
    prompt: Annotated[
        str,
        typer.Argument(metavar="[PROMPT]", help="what to ask; - reads stdin; without it, a talk", show_default=False),
    ] = "",
    system: Annotated[str, typer.Option("--system", metavar="TEXT", help="a system message before everything")] = "",
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", metavar="N", min=0, help="end the answer there; 0: no limit")
    ] = 0,
    temperature: Annotated[
        float | None, typer.Option("--temperature", metavar="T", min=0, max=2, help="else the model's own")
    ] = None,
    as_json: Json = False,
) -> int:
    """Ask a model. What is missing for that, its backend, its files, a process, is brought about first, and shown.

    \b
    Examples:
      corral chat smollm2-135m "What is a corral?"
      corral chat smollm2-135m                      a talk: a line from you, an answer, and so on; Ctrl-D ends it,
                                                    Ctrl-C only an answer
      git diff | corral chat smollm2-135m - --system "Write a commit message."
    """
    options: dict[str, Any] = {}
    if max_tokens:
        options["max_tokens"] = max_tokens
    if temperature is not None:
        options["temperature"] = temperature
    talk = _Talk(client, model, system, options)
    question = _question(prompt)
    if question is None and as_json:
        raise typer.BadParameter("--json wants a prompt")
    if not await talk.get_ready():
        return FAILED
    if question is not None:
        return await talk.ask(question, as_json=as_json)
    return await _talk(talk)


def _question(prompt: str) -> str | None:
    """None: somebody sits there, and will type."""
    if prompt == "-" or (not prompt and not sys.stdin.isatty()):
        if isinstance(sys.stdin, io.TextIOWrapper):
            # Bytes that are no text (a diff of some old file, say) become the sign for that: a model reads the rest.
            sys.stdin.reconfigure(errors="replace")
        prompt = sys.stdin.read().strip()
        if not prompt:
            raise Invalid("nothing to ask: stdin is empty")
    return prompt or None


async def _talk(talk: _Talk) -> int:
    remark("Type a line and press Enter; Ctrl-D ends the talk.")
    while True:
        try:
            line = await _typed("> ")
        except EOFError:
            remark("")
            return DONE
        if line.strip():
            await _until_enough(talk.ask(line.strip()))


async def _until_enough(asking: Coroutine[Any, Any, int]) -> None:
    """Ctrl-C ends the answer, and not the talk."""
    loop, answering = asyncio.get_running_loop(), asyncio.ensure_future(asking)
    loop.add_signal_handler(signal.SIGINT, answering.cancel)
    try:
        await asyncio.wait((answering,))
    finally:
        loop.remove_signal_handler(signal.SIGINT)
        answering.cancel()  # where somebody ended us
    if answering.cancelled():
        remark("\n(interrupted)")
    else:
        answering.result()


async def _typed(prompt: str) -> str:
    """A line from the terminal, which hands over whole ones. Not from a thread: one that waits for a person cannot be
    stopped, and Ctrl-C would wait along with it. Raises EOFError."""
    print(prompt, end="", file=sys.stderr, flush=True)
    loop, terminal, typed = asyncio.get_running_loop(), sys.stdin.fileno(), b""
    while not typed.endswith(b"\n"):
        something = asyncio.Event()
        loop.add_reader(terminal, something.set)
        try:
            await something.wait()
        finally:
            loop.remove_reader(terminal)
        piece = os.read(terminal, 65536)
        if not piece and not typed:
            raise EOFError
        if not piece:  # Ctrl-D within a line ends the line
            break
        typed += piece
    return typed.decode(errors="replace")


class _Talk:
    def __init__(self, client: Client, model: str, system: str, options: dict[str, Any]) -> None:
        self._client = client
        self._model = model
        self._options = options
        self._messages: list[dict[str, str]] = [{"role": "system", "content": system}] if system else []

    async def get_ready(self) -> bool:
        """Whoever may not ask for a load has it caused by the question itself; and a model that is there answers also
        while the controller is away."""
        try:
            begun = await self._client.loads.ask(self._model)
        except (Denied, Unavailable, OutcomeUnknown):
            return True
        status = await self._follow(begun)
        if status.state == LoadState.FAILED:
            complain(f"{self._model} could not be loaded: {status.error or 'nobody says why'}")
            remark(f"`corral why model {self._model}` tells more.")
            return False
        return True

    async def _answer(self, head: list[tuple[str, str]]) -> AsyncGenerator[Said, None]:
        """A question that could not be held until its model was there is asked again when it is."""
        from corral.client.chat import chat as stream

        while True:
            begun = False
            try:
                async with WhileWaiting(self._client, self._model) as waiting:
                    async for said in stream(
                        self._client, self._model, self._messages, options=self._options, head=head
                    ):
                        begun = True
                        await waiting.over()
                        yield said
                return
            except Unavailable:
                if begun or not await self._becomes_ready():
                    raise

    async def _becomes_ready(self) -> bool:
        """False: it is not being loaded, or in vain."""
        found = await self._client.loads.find(self._model)
        return found is not None and (await self._follow(found)).state == LoadState.LOADED

    async def _follow(self, status: LoadStatus) -> LoadStatus:
        """To its end, which is told."""
        with LoadProgress() as progress:
            async for told in self._client.loads.follow(status):
                progress.see(told)
        return told

    async def ask(self, question: str, *, as_json: bool = False) -> int:
        from corral.client.chat import Said

        self._messages.append({"role": "user", "content": question})
        head: list[tuple[str, str]] = []
        answer: list[str] = []
        began, first = time.monotonic(), 0.0
        last = Said()
        try:
            async for said in self._answer(head):
                first = first or time.monotonic() - began
                last = said
                answer.append(said.text)
                if said.text and not as_json:
                    print(_shown(said.text), end="", flush=True)
        except asyncio.CancelledError:  # in a talk it goes on: with what was said so far
            if answer:
                self._messages.append({"role": "assistant", "content": "".join(answer)})
            else:
                self._messages.pop()
            raise
        except CorralError as error:
            if answer and not as_json:
                print(flush=True)
            complain(error.message)
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
            remark("(the answer was cut off: no more tokens)")
        return DONE


def _node_of(head: list[tuple[str, str]]) -> str:
    return next((value for name, value in head if name.lower() in _NODE_HEADERS), "")


def _shown(text: str) -> str:
    """Line by line as it came, without what could steer a terminal."""
    return "\n".join(plain(line.replace("\t", "    ")) for line in text.split("\n"))
