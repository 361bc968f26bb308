"""How a build is run: the gallery's `corral:` extension (docs/reference/gallery.md#corral-the-manifest). Pure.

    corral:
      protocol: openai            # or grpc
      command: [python, serve.py, --host, "{host}", --port, "{port}", --model, "{model_file}"]
      env: {OMP_NUM_THREADS: "4"}
      ready: {path: /health, timeout_s: 120}
      slots: 4
      devices: one                # none, one, many; empty: as placement picks
      needs: {libraries: [libgomp.so.1], debian: [libgomp1]}  # of the system, not of the build
      continues: {chat: prefill, completions: prompt}  # how it goes on with a text that another process began

A build without it is LocalAI's: `run.sh --addr host:port`, speaking gRPC. The command runs in the version's folder; its
first word, when it has no slash, is looked for in the build's own environment (`venv/bin`), then in that folder, then
on PATH. Starting it is the supervisor's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import msgspec

from corral.contract.codec import Message, always
from corral.kit.errors import Invalid

OPENAI = "openai"
GRPC = "grpc"
PROTOCOLS = (OPENAI, GRPC)
DEVICES = ("", "none", "one", "many")
# How a backend goes on with the beginning of an answer. Of chats: a last message of the assistant is continued by
# itself (`prefill`), or with vLLM's field of that name. Of completions: the text follows the prompt.
CHAT_CONTINUATIONS = ("", "prefill", "continue_final_message")
COMPLETION_CONTINUATIONS = ("", "prompt")
MAX_SLOTS = 65_536
MAX_WAIT_S = 24 * 3600.0
MAX_NEEDS = 64

_PLACEHOLDER = re.compile(r"\{([a-z_]+)\}")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
_LIBRARY = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_+.-]{0,126}\.so(\.[0-9]+)*\Z")
_DEBIAN_PACKAGE = re.compile(r"[a-z0-9][a-z0-9+.-]{1,126}\Z")  # Debian policy, 5.6.1: no option, no path, no version


class Ready(Message, frozen=True):
    """When the process can answer. `grpc` asks Health and needs no path."""

    path: str = "/health"
    timeout_s: float = 30.0  # without output or progress, not in all


class Needs(Message, frozen=True):
    """Shared libraries that the machine must have: the build does not bring them."""

    libraries: tuple[str, ...] = ()  # as the linker looks them up: libgomp.so.1
    debian: tuple[str, ...] = ()  # the packages that have them on Debian and Ubuntu


class Continues(Message, frozen=True):
    """How the backend goes on with the beginning of an answer; empty: it cannot."""

    chat: str = ""
    completions: str = ""


class Manifest(Message, frozen=True):
    protocol: str = always(str)  # openai | grpc
    command: tuple[str, ...] = ()
    env: dict[str, str] = msgspec.field(default_factory=dict)
    ready: Ready = msgspec.field(default_factory=Ready)
    slots: int = 1  # requests one process serves at once, unless the model's definition says otherwise
    devices: str = ""  # accelerators one process can use: none, one, many; empty: as placement picks
    needs: Needs | None = None  # None: nothing that was declared
    continues: Continues | None = None  # None: not declared, so no stream is continued on it


LOCALAI = Manifest(protocol=GRPC, command=("./run.sh", "--addr", "{host}:{port}"))


def can_continue(manifest: Manifest | None) -> bool:
    """Whether a build declares how it goes on with the beginning of an answer, of chats or of completions."""
    declared = manifest.continues if manifest is not None else None
    return declared is not None and bool(declared.chat or declared.completions)


@dataclass(frozen=True, slots=True, kw_only=True)
class Placeholders:
    """The values of placeholders in a command or in the environment. Empty: no value."""

    host: str
    port: int
    model_name: str = ""
    model_file: str = ""  # the weights, absolute
    model_dir: str = ""  # the folder they are in, absolute
    context_size: int = 0
    devices: str = ""  # 0,1 or the driver's ids
    device_count: int = 0
    slots: int = 0
    backend_dir: str = ""  # the version's folder, absolute
    mode: str = ""  # embeddings or reranking, where the definition says that the model is for that
    pooling: str = ""  # of an embeddings model: mean, cls, last
    threads: str = ""
    gpu_layers: str = ""
    mmproj: str = ""  # the projector of a model that sees, absolute


NAMES = frozenset(Placeholders.__dataclass_fields__)
FROM_DEFINITION = frozenset({"mode", "pooling", "threads", "gpu_layers", "mmproj"})  # as texts, as the model says them


def fill_command(command: Sequence[str], values: Placeholders) -> tuple[str, ...]:
    """The words to run. Raises Invalid for a placeholder we do not know.

    A word with a placeholder without a value is dropped, and so is the flag right before it: `--max-model-len
    {context_size}` is left out for a model without a context size.
    """
    known = _known(values)
    words: list[str] = []
    for position, word in enumerate(command):
        if _has_values(word, known):
            words.append(_fill(word, known))
        elif position and words and command[position - 1].startswith("-") and words[-1] == command[position - 1]:
            words.pop()
    return tuple(words)


def fill_environment(env: Mapping[str, str], values: Placeholders) -> dict[str, str]:
    """The variables to set; one whose placeholder has no value is left out."""
    known = _known(values)
    return {key: _fill(text, known) for key, text in env.items() if _has_values(text, known)}


def check_manifest(manifest: Manifest) -> None:
    """Raises Invalid with the first part that no worker could run."""
    if manifest.protocol not in PROTOCOLS:
        raise Invalid(f"protocol {manifest.protocol!r} is neither openai nor grpc")
    if manifest.protocol == OPENAI and not manifest.command:
        raise Invalid("an openai backend needs a command")
    if manifest.devices not in DEVICES:
        raise Invalid(f"devices {manifest.devices!r} is none of none, one, many")
    if not 1 <= manifest.slots <= MAX_SLOTS:
        raise Invalid(f"slots must be 1 to {MAX_SLOTS}, not {manifest.slots}")
    if not 0 < manifest.ready.timeout_s <= MAX_WAIT_S:
        raise Invalid(f"ready.timeout_s must be above 0 and at most {MAX_WAIT_S:.0f}")
    if not manifest.ready.path.startswith("/") or any(ord(char) <= 0x20 for char in manifest.ready.path):
        raise Invalid(f"ready.path {manifest.ready.path!r} is not a path")
    for key in manifest.env:
        if not _VARIABLE.match(key):
            raise Invalid(f"{key!r} is not the name of an environment variable")
    for word in (*manifest.command, *manifest.env.values()):
        _check_word(word)
    if manifest.needs is not None:
        check_needs(manifest.needs)
    if manifest.continues is not None:
        _check_continues(manifest)


def check_needs(needs: Needs) -> None:
    """Raises Invalid. A worker checks again what an order brings: its package manager runs as root."""
    if len(needs.libraries) > MAX_NEEDS or len(needs.debian) > MAX_NEEDS:
        raise Invalid(f"needs: at most {MAX_NEEDS} libraries and {MAX_NEEDS} packages")
    for library in needs.libraries:
        if not _LIBRARY.match(library):
            raise Invalid(f"needs: {library[:64]!r} is not the name of a library; write it such as libgomp.so.1")
    for package in needs.debian:
        if not _DEBIAN_PACKAGE.match(package):
            raise Invalid(f"needs: {package[:64]!r} is not the name of a Debian package")


def _check_continues(manifest: Manifest) -> None:
    declared = manifest.continues
    assert declared is not None
    if manifest.protocol != OPENAI:
        raise Invalid("continues: only an openai backend can go on with the beginning of an answer")
    for name, value, known in (
        ("chat", declared.chat, CHAT_CONTINUATIONS),
        ("completions", declared.completions, COMPLETION_CONTINUATIONS),
    ):
        if value not in known:
            raise Invalid(f"continues.{name} {value[:64]!r} is none of {', '.join(filter(None, known))}")


def _check_word(word: str) -> None:
    if "\0" in word:
        raise Invalid("a command cannot contain NUL")
    if unknown := [name for name in _PLACEHOLDER.findall(word) if name not in NAMES]:
        raise Invalid(f"unknown placeholder {{{unknown[0]}}}; there are {', '.join(sorted(NAMES))}")


def _known(values: Placeholders) -> dict[str, str]:
    return {name: str(value) if value else "" for name, value in asdict(values).items()}


def _has_values(word: str, known: Mapping[str, str]) -> bool:
    _check_word(word)  # the sender of a manifest may know other placeholders
    return all(known[name] for name in _PLACEHOLDER.findall(word))


def _fill(word: str, known: Mapping[str, str]) -> str:
    # One pass: a value that itself looks like a placeholder (a model called "{port}") stays what it is.
    return _PLACEHOLDER.sub(lambda found: known[found.group(1)], word)
