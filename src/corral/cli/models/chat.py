"""`corral chat MODEL ["prompt"]`: sends a prompt and streams the answer; loads the model first if necessary."""

from __future__ import annotations

import asyncio
import io
import os
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from corral.cli.common import declare
from corral.cli.common.fleet_command import fleet_command
from corral.cli.common.options import Json
from corral.cli.common.output import DONE, FAILED, print_error, print_json, print_note, printable
from corral.cli.models.chat_terminal import (
    COMMANDS,
    HELP,
    LineReader,
    WordWrap,
    history_file,
    parse_command,
    prompt_of,
    save_conversation,
)
from corral.cli.models.load_progress import LoadProgress, LoadWatcher
from corral.contract.loads import LoadState, LoadStatus
from corral.kit.errors import CorralError, Denied, Invalid, OutcomeUnknown, Unavailable
from corral.kit.humanize import similar_names

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
    no_history: Annotated[
        bool, declare.Option("--no-history", help="in a conversation, do not keep what is typed")
    ] = False,
    as_json: Json = False,
) -> int:
    """Send a prompt to a model and print the answer.

    A model that is not loaded is loaded first: the backend is installed, the files are fetched, a replica is started.

    Without a prompt a conversation begins. Its lines can be edited; earlier ones, also of other conversations, are
    found with the arrow keys and Ctrl-R. /help lists its commands: /model, /reset, /save.

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
    return await send(
        client, model, prompt, system=system, options=options, as_json=as_json, keeps_history=not no_history
    )


async def send(
    client: Client,
    model: str,
    prompt: str,
    *,
    system: str = "",
    options: dict[str, Any] | None = None,
    as_json: bool = False,
    keeps_history: bool = True,
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
    return await _converse(conversation, LineReader(history_file(os.environ) if keeps_history else None))


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


async def _converse(conversation: _Conversation, reader: LineReader) -> int:
    print_note(
        "Type a prompt and press Enter. Ctrl-C stops an answer, Ctrl-D ends the conversation, /help lists commands."
    )
    while True:
        try:
            line = (await reader.read("> ")).strip()
        except EOFError:
            print_note("")
            return DONE
        if (command := parse_command(line)) is not None:
            await _run_command(conversation, *command)
        elif line:
            await _cancel_on_interrupt(conversation.ask(prompt_of(line)))


async def _run_command(conversation: _Conversation, name: str, argument: str) -> None:
    match name:
        case "/help":
            print_note(HELP)
        case "/model" if argument:
            await _cancel_on_interrupt(conversation.change_model(argument))
        case "/model":
            print_note(conversation.model)
        case "/reset":
            conversation.reset()
            print_note("(the conversation starts again)")
        case "/save" if argument:
            try:
                save_conversation(Path(argument), conversation.messages)
                print_note(f"(saved in {argument})")
            except OSError as error:
                print_error(f"cannot save {argument}: {error.strerror}")
        case _:
            if name in COMMANDS:
                print_error(f"{name} needs the name of a file")
                return
            close = similar_names(name, COMMANDS, cutoff=0.5)
            hint = f"did you mean {close[0]}?" if close else "/help lists the commands."
            print_error(f"no command {name}: {hint} A second slash in front sends it to the model.")


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


class _Conversation:
    def __init__(self, client: Client, model: str, system: str, options: dict[str, Any]) -> None:
        self._client = client
        self._model = model
        self._options = options
        self._begin: list[dict[str, str]] = [{"role": "system", "content": system}] if system else []
        self._messages = list(self._begin)

    @property
    def model(self) -> str:
        return self._model

    @property
    def messages(self) -> list[dict[str, str]]:
        return self._messages

    def reset(self) -> None:
        self._messages = list(self._begin)

    async def change_model(self, model: str) -> int:
        """The conversation goes on with another model, if that can be loaded."""
        before, self._model = self._model, model
        is_loaded = False
        try:
            is_loaded = await self.load()
        except CorralError as error:
            print_error(error.message)
        finally:  # also after Ctrl-C
            if not is_loaded:
                self._model = before
        print_note(f"({self._model} answers now)" if is_loaded else f"(still {before})")
        return DONE if is_loaded else FAILED

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
        wrap = WordWrap(shutil.get_terminal_size().columns) if sys.stdout.isatty() and not as_json else None
        try:
            async for said in self._answer(head):
                first = first or time.monotonic() - began
                last = said
                answer.append(said.text)
                if said.text and not as_json:
                    print(wrap.feed(_shown(said.text)) if wrap else _shown(said.text), end="", flush=True)
            if wrap:
                print(wrap.flush(), end="", flush=True)
        except asyncio.CancelledError:  # the conversation continues with the part that was received
            if wrap:
                print(wrap.flush(), end="", flush=True)
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
