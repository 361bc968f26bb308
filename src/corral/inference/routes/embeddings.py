"""`/v1/embeddings` over Embedding, `/v1/rerank` over Rerank."""

from __future__ import annotations

import asyncio
import base64
import math
import struct
from collections.abc import Sequence
from typing import Any

from corral.contract import backend_pb2 as pb
from corral.contract.codec import encode
from corral.contract.http import Responder
from corral.inference.api_errors import JSON, Refused, bad
from corral.inference.backend_process import Served
from corral.inference.grpc.client import Caller
from corral.inference.grpc.predict_options import text_options
from corral.inference.openai.json_body import Asked

MOST_INPUTS = 2048
HALF_LIFE_TOKENS = 64.0
_INT32 = 2**31
Input = str | list[int]


async def embed(caller: Caller, asked: Asked, responder: Responder) -> int:
    inputs = read_inputs(asked)
    wanted = asked.text("encoding_format", "float")
    if wanted not in ("float", "base64"):
        raise bad("encoding_format", "encoding_format must be float or base64.")
    results = await _embed_all(caller, inputs)
    vectors = [pooled(result, caller.served) for result in results]
    _check_dimensions(asked, vectors)
    rows = [
        {"object": "embedding", "index": at, "embedding": _packed(vector) if wanted == "base64" else vector}
        for at, vector in enumerate(vectors)
    ]
    tokens = sum(result.prompt_tokens for result in results)
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    answer = {"object": "list", "model": caller.served.model, "data": rows, "usage": usage}
    await responder.send(200, (JSON,), encode(answer))
    return 200


def read_inputs(asked: Asked) -> list[Input]:
    """One text, several, the ids of one, or of several."""
    told = asked.get("input")
    if isinstance(told, str):
        return [told]
    if isinstance(told, list) and told:
        if all(isinstance(item, str) for item in told):
            return _few(told)
        if _are_tokens(told):
            return [told]
        if all(isinstance(item, list) and item and _are_tokens(item) for item in told):
            return _few(told)
    raise bad("input", "input must be a string, a list of strings, a list of token ids, or a list of such lists.")


def _few(inputs: list[Input]) -> list[Input]:
    if len(inputs) > MOST_INPUTS:
        raise bad("input", f"input has at most {MOST_INPUTS} entries.")
    return inputs


def _are_tokens(told: Sequence[object]) -> bool:
    return all(isinstance(item, int) and not isinstance(item, bool) and 0 <= item < _INT32 for item in told)


async def _embed_all(caller: Caller, inputs: Sequence[Input]) -> list[pb.EmbeddingResult]:
    """One call for each, as many at once as the process has slots."""
    free = asyncio.Semaphore(max(1, caller.served.slots))

    async def one(asked: Input) -> pb.EmbeddingResult:
        options = text_options(caller.served)
        if isinstance(asked, str):
            options.Embeddings = asked
        else:
            options.EmbeddingTokens.extend(asked)
        async with free:
            return await caller.ask("Embedding", options, pb.EmbeddingResult)

    if len(inputs) == 1:
        return [await one(inputs[0])]
    async with asyncio.TaskGroup() as tasks:
        asking = [tasks.create_task(one(each)) for each in inputs]
    return [task.result() for task in asking]


def pooled(result: pb.EmbeddingResult, served: Served) -> list[float]:
    """One vector. A backend that gives one per token leaves it to us how they become one."""
    values = list(result.embeddings)
    if result.layout != pb.EMBEDDING_LAYOUT_PER_TOKEN:
        return values
    width, count = result.dim, result.tokens
    if width <= 0 or count <= 0 or width * count != len(values):
        raise Refused(502, f"The backend told {count} × {width} numbers and sent {len(values)}.", code="backend_failed")
    rows = [values[at * width : (at + 1) * width] for at in range(count)]
    match served.setting("parameters", "pooling"):
        case "last":
            return rows[-1]
        case "decayed_mean":
            told = served.setting("parameters", "pooling_half_life_tokens")
            half_life = float(told) if isinstance(told, int | float) and told > 0 else HALF_LIFE_TOKENS
            weights = [math.exp2((at + 1 - count) / half_life) for at in range(count)]
        case _:
            weights = [1.0] * count
    whole = sum(weights)
    return [sum(weight * row[at] for weight, row in zip(weights, rows, strict=True)) / whole for at in range(width)]


def _check_dimensions(asked: Asked, vectors: Sequence[Sequence[float]]) -> None:
    wanted = asked.whole("dimensions")
    if wanted is not None and any(len(vector) != wanted for vector in vectors):
        raise bad("dimensions", f"This model's vectors have {len(vectors[0])} dimensions, not {wanted}.")


def _packed(vector: Sequence[float]) -> str:
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()


async def rerank(caller: Caller, asked: Asked, responder: Responder) -> int:
    query, documents = asked.text("query"), read_documents(asked)
    if not query:
        raise bad("query", "query must be a text.")
    most = asked.whole("top_n")
    if most is not None and most < 1:
        raise bad("top_n", "top_n must be at least 1.")
    most = min(most or len(documents), len(documents))
    request = pb.RerankRequest(query=query, documents=documents, top_n=most, ModelIdentity=caller.served.identity)
    result = await caller.ask("Rerank", request, pb.RerankResult)
    usage = {"total_tokens": result.usage.total_tokens, "prompt_tokens": result.usage.prompt_tokens}
    shown = asked.get("return_documents") is not False
    ranked = sorted(result.results, key=lambda each: -each.relevance_score)[:most]
    rows = [_ranked(each, documents, shown) for each in ranked]
    await responder.send(200, (JSON,), encode({"model": caller.served.model, "usage": usage, "results": rows}))
    return 200


def read_documents(asked: Asked) -> list[str]:
    told = asked.get("documents")
    if not isinstance(told, list) or not told:
        raise bad("documents", "documents must be a list with at least one text.")
    texts = [each.get("text") if isinstance(each, dict) else each for each in told]
    good = [text for text in texts if isinstance(text, str)]
    if len(good) != len(texts):
        raise bad("documents", "documents must be texts, or objects with a text.")
    return good


def _ranked(result: pb.DocumentResult, documents: Sequence[str], shown: bool) -> dict[str, Any]:
    if not 0 <= result.index < len(documents):
        raise Refused(502, f"The backend ranked a document {result.index} that nobody sent.", code="backend_failed")
    row: dict[str, Any] = {"index": result.index, "relevance_score": result.relevance_score}
    return row | {"document": {"text": result.text or documents[result.index]}} if shown else row
