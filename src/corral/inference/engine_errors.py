"""Explains errors of engines: an engine names its own flags, but users set keys of a model's definition. Pure.

Only answers with a status of 400 and more are passed in; unknown errors stay unchanged.
"""

from __future__ import annotations

import re

import msgspec

from corral.contract.http import Headers
from corral.inference.api_errors import JSON, ApiError

_LLAMA_CPP = b"llama.cpp"
_DISABLED = re.compile(r"does not support (embeddings|reranking)\b")
_POOLING = re.compile(r"Pooling type '?\w+'? is not OAI compatible")
_NO_INPUT = re.compile(r"\b(image|audio|video) input is not supported\b")


def may_be_explained(status: int, headers: Headers) -> bool:
    """Whether `explain` may know this answer, so that its body has to be read."""
    return status in (400, 500, 501) and any(name == b"server" and value == _LLAMA_CPP for name, value in headers)


def explain(model: str, words: str) -> ApiError | None:
    """The error for the client instead of the engine's; None: the engine's error is passed on."""
    edit = f"corral models edit {model} --set"
    if (disabled := _DISABLED.search(words)) is not None:
        what = disabled[1]
        message = (
            f"The model `{model}` does not serve {what}: its definition lacks `{what}: true`. "
            f"To set it: {edit} {what}=true"
        )
        return ApiError(400, message, code=f"{what}_disabled", param="model")
    if _POOLING.search(words) is not None:
        message = (
            f"The model `{model}` has no pooling, so it has no single vector for a text. "
            f"To set one: {edit} parameters.pooling=mean"
        )
        return ApiError(400, message, code="no_pooling", param="model")
    if (missing := _NO_INPUT.search(words)) is not None:
        what = {"image": "images", "audio": "audio", "video": "videos"}[missing[1]]
        message = (
            f"The model `{model}` takes no {what}: send text only, or use a model that does. "
            "(With llama.cpp that takes a projector file, named by `mmproj` in the model's definition.)"
        )
        return ApiError(400, message, code="unsupported_input", param="messages")
    return None


def client_answer(model: str, status: int, answer: bytes) -> tuple[int, Headers, bytes]:
    """The answer for the client: explained, or unchanged."""
    explained = explain(model, _message(answer))
    if explained is not None:
        return explained.status, explained.headers, explained.body
    if not answer:
        refused = ApiError(status, f"The engine answered {status} and gave no reason.", code="backend_failed")
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
