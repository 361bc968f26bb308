"""Errors of engines in words that help: an engine names its own flags, people set keys of a model's definition. Pure.

Only answers of 400 and more come here, and only those whose words are known are changed.
"""

from __future__ import annotations

import re

import msgspec

from corral.contract.http import Headers
from corral.inference.api_errors import JSON, Refused

_LLAMA_CPP = b"llama.cpp"
_DISABLED = re.compile(r"does not support (embeddings|reranking)\b")
_POOLING = re.compile(r"Pooling type '?\w+'? is not OAI compatible")
_NO_INPUT = re.compile(r"\b(image|audio|video) input is not supported\b")


def is_explained(status: int, headers: Headers) -> bool:
    """Whether this answer may be one of those that `explain` knows: then its body is worth reading."""
    return status in (400, 500, 501) and any(name == b"server" and value == _LLAMA_CPP for name, value in headers)


def explain(model: str, words: str) -> Refused | None:
    """What a client is told instead of an engine's words; None: they are as good as ours."""
    edit = f"corral models edit {model} --set"
    if (disabled := _DISABLED.search(words)) is not None:
        what = disabled[1]
        message = (
            f"The model `{model}` does not serve {what}: its definition lacks `{what}: true`. "
            f"To set it: {edit} {what}=true"
        )
        return Refused(400, message, code=f"{what}_disabled", param="model")
    if _POOLING.search(words) is not None:
        message = (
            f"The model `{model}` has no pooling, so it has no single vector for a text. "
            f"To set one: {edit} parameters.pooling=mean"
        )
        return Refused(400, message, code="no_pooling", param="model")
    if (missing := _NO_INPUT.search(words)) is not None:
        what = {"image": "images", "audio": "audio", "video": "videos"}[missing[1]]
        message = (
            f"The model `{model}` takes no {what}: send text only, or use a model that does. "
            "(With llama.cpp that takes a projector file, named by `mmproj` in the model's definition.)"
        )
        return Refused(400, message, code="unsupported_input", param="messages")
    return None


def told_to_client(model: str, status: int, answer: bytes) -> tuple[int, Headers, bytes]:
    """The answer a client gets for an engine's: explained, or as it came."""
    explained = explain(model, _message(answer))
    if explained is not None:
        return explained.status, explained.headers, explained.body
    if not answer:
        refused = Refused(status, f"The engine answered {status} and gave no reason.", code="backend_failed")
        return status, refused.headers, refused.body
    return status, (JSON,), answer


def _message(answer: bytes) -> str:
    try:
        found = msgspec.json.decode(answer)
    except msgspec.DecodeError:
        return ""
    error = found.get("error") if isinstance(found, dict) else None
    message = error.get("message") if isinstance(error, dict) else error
    return message if isinstance(message, str) else ""
