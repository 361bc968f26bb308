"""One model as its page shows it: what changed from revision to revision, and how to call it. Pure."""

from __future__ import annotations

import difflib
import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from corral.controller.web.words import ago
from corral.kit.humanize import to_yaml
from corral.store.tables.model_revisions import ModelRevision

_QUESTION = "What is a corral?"
_REVISION = 12
MAX_DIFF_LINES = 200


@dataclass(frozen=True)
class DiffLine:
    css: str  # added, removed, or empty
    text: str


@dataclass(frozen=True)
class RevisionLine:
    key: str
    revision: str
    at: str
    ago: str
    words: str
    diff: tuple[DiffLine, ...]


@dataclass(frozen=True)
class Snippet:
    title: str
    text: str


def revision_lines(kept: Sequence[ModelRevision], now: datetime) -> tuple[RevisionLine, ...]:
    """The newest first, each with what it changed in the one before."""
    before = [*kept[1:], None]
    return tuple(_revision(each, old, now) for each, old in zip(kept, before, strict=True))


def _revision(kept: ModelRevision, before: ModelRevision | None, now: datetime) -> RevisionLine:
    diff = diff_of(to_yaml(before.definition), to_yaml(kept.definition)) if before is not None else ()
    added, removed = sum(line.css == "added" for line in diff), sum(line.css == "removed" for line in diff)
    if before is None:
        words = "the oldest revision on record"
    elif before.revision == kept.revision:
        words = f"+{added} −{removed} lines, nothing that a process notices"
    else:
        words = f"+{added} −{removed} lines"
    return RevisionLine(
        str(kept.row_version), kept.revision[:_REVISION], kept.at.isoformat(), ago(kept.at, now), words, diff
    )


def diff_of(before: str, after: str) -> tuple[DiffLine, ...]:
    marks = {"+": "added", "-": "removed"}
    lines = list(difflib.unified_diff(before.splitlines(), after.splitlines(), lineterm="", n=2))[2:]
    return tuple(DiffLine(marks.get(line[:1], ""), line) for line in lines[:MAX_DIFF_LINES])


def snippets(model: str, base: str) -> tuple[Snippet, ...]:
    """Lines to copy; the key stands in the environment."""
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": _QUESTION}]}, ensure_ascii=False)
    name = json.dumps(model, ensure_ascii=False)
    return (
        Snippet("Command line", f"corral chat {shlex.quote(model)} {shlex.quote(_QUESTION)}"),
        Snippet(
            "curl",
            f"curl {base}/v1/chat/completions \\\n"
            '  -H "Authorization: Bearer $CORRAL_KEY" -H "Content-Type: application/json" \\\n'
            f"  -d {shlex.quote(body)}",
        ),
        Snippet(
            "Python",
            "import os\nfrom openai import OpenAI\n\n"
            f'client = OpenAI(base_url="{base}/v1", api_key=os.environ["CORRAL_KEY"])\n'
            "answer = client.chat.completions.create(\n"
            f'    model={name},\n    messages=[{{"role": "user", "content": "{_QUESTION}"}}],\n)\n'
            "print(answer.choices[0].message.content)",
        ),
        Snippet(
            "JavaScript",
            'import OpenAI from "openai";\n\n'
            f'const client = new OpenAI({{ baseURL: "{base}/v1", apiKey: process.env.CORRAL_KEY }});\n'
            "const answer = await client.chat.completions.create({\n"
            f'  model: {name},\n  messages: [{{ role: "user", content: "{_QUESTION}" }}],\n}});\n'
            "console.log(answer.choices[0].message.content);",
        ),
    )
