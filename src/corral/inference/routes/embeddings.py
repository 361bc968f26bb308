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
from corral.inference.api_errors import JSON, ApiError, invalid_field
from corral.inference.backend_process import BackendProcess
from corral.inference.grpc.client import BackendClient
from corral.inference.grpc.predict_options import text_options
from corral.inference.openai.json_body import JsonBody

MAX_INPUTS = 2048
HALF_LIFE_TOKENS = 64.0
_INT32 = 2**31
Input = str | list[int]


async def embed(client: BackendClient, body: JsonBody, responder: Responder) -> int:
    inputs = read_inputs(body)
    wanted = body.text("encoding_format", "float")
    if wanted not in ("float", "base64"):
        raise invalid_field("encoding_format", "encoding_format must be float or base64.")
    results = await _embed_all(client, inputs)
    vectors = [pooled(result, client.process) for result in results]
    _check_dimensions(body, vectors)
    rows = [
        {"object": "embedding", "index": at, "embedding": _packed(vector) if wanted == "base64" else vector}
        for at, vector in enumerate(vectors)
    ]
    tokens = sum(result.prompt_tokens for result in results)
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    answer = {"object": "list", "model": client.process.model, "data": rows, "usage": usage}
    await responder.send(200, (JSON,), encode(answer))
    return 200


def read_inputs(body: JsonBody) -> list[Input]:
    """One text, several texts, one list of token ids, or several such lists."""
    given = body.get("input")
    if isinstance(given, str):
        return [given]
    if isinstance(given, list) and given:
        if all(isinstance(item, str) for item in given):
            return _few(given)
        if _are_tokens(given):
            return [given]
        if all(isinstance(item, list) and item and _are_tokens(item) for item in given):
            return _few(given)
    raise invalid_field(
        "input", "input must be a string, a list of strings, a list of token ids, or a list of such lists."
    )


def _few(inputs: list[Input]) -> list[Input]:
    if len(inputs) > MAX_INPUTS:
        raise invalid_field("input", f"input has at most {MAX_INPUTS} entries.")
    return inputs


def _are_tokens(given: Sequence[object]) -> bool:
    return all(isinstance(item, int) and not isinstance(item, bool) and 0 <= item < _INT32 for item in given)


async def _embed_all(client: BackendClient, inputs: Sequence[Input]) -> list[pb.EmbeddingResult]:
    """One call per input, with as many concurrent calls as the process has slots."""
    free = asyncio.Semaphore(max(1, client.process.slots))

    async def embed_one(text: Input) -> pb.EmbeddingResult:
        options = text_options(client.process)
        if isinstance(text, str):
            options.Embeddings = text
        else:
            options.EmbeddingTokens.extend(text)
        async with free:
            return await client.call("Embedding", options, pb.EmbeddingResult)

    if len(inputs) == 1:
        return [await embed_one(inputs[0])]
    async with asyncio.TaskGroup() as tasks:
        pending = [tasks.create_task(embed_one(each)) for each in inputs]
    return [task.result() for task in pending]


def pooled(result: pb.EmbeddingResult, process: BackendProcess) -> list[float]:
    """One vector. If the backend returns one vector per token, they are pooled here."""
    values = list(result.embeddings)
    if result.layout != pb.EMBEDDING_LAYOUT_PER_TOKEN:
        return values
    width, count = result.dim, result.tokens
    if width <= 0 or count <= 0 or width * count != len(values):
        raise ApiError(
            502, f"The backend announced {count} × {width} numbers and sent {len(values)}.", code="backend_failed"
        )
    rows = [values[at * width : (at + 1) * width] for at in range(count)]
    match process.setting("parameters", "pooling"):
        case "last":
            return rows[-1]
        case "decayed_mean":
            given = process.setting("parameters", "pooling_half_life_tokens")
            half_life = float(given) if isinstance(given, int | float) and given > 0 else HALF_LIFE_TOKENS
            weights = [math.exp2((at + 1 - count) / half_life) for at in range(count)]
        case _:
            weights = [1.0] * count
    whole = sum(weights)
    return [sum(weight * row[at] for weight, row in zip(weights, rows, strict=True)) / whole for at in range(width)]


def _check_dimensions(body: JsonBody, vectors: Sequence[Sequence[float]]) -> None:
    wanted = body.whole("dimensions")
    if wanted is not None and any(len(vector) != wanted for vector in vectors):
        raise invalid_field("dimensions", f"This model's vectors have {len(vectors[0])} dimensions, not {wanted}.")


def _packed(vector: Sequence[float]) -> str:
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()


async def rerank(client: BackendClient, body: JsonBody, responder: Responder) -> int:
    query, documents = body.text("query"), read_documents(body)
    if not query:
        raise invalid_field("query", "query must be a text.")
    most = body.whole("top_n")
    if most is not None and most < 1:
        raise invalid_field("top_n", "top_n must be at least 1.")
    most = min(most or len(documents), len(documents))
    request = pb.RerankRequest(query=query, documents=documents, top_n=most, ModelIdentity=client.process.identity)
    result = await client.call("Rerank", request, pb.RerankResult)
    usage = {"total_tokens": result.usage.total_tokens, "prompt_tokens": result.usage.prompt_tokens}
    shown = body.get("return_documents") is not False
    ranked = sorted(result.results, key=lambda each: -each.relevance_score)[:most]
    rows = [_ranked(each, documents, shown) for each in ranked]
    await responder.send(200, (JSON,), encode({"model": client.process.model, "usage": usage, "results": rows}))
    return 200


def read_documents(body: JsonBody) -> list[str]:
    given = body.get("documents")
    if not isinstance(given, list) or not given:
        raise invalid_field("documents", "documents must be a list with at least one text.")
    texts = [each.get("text") if isinstance(each, dict) else each for each in given]
    good = [text for text in texts if isinstance(text, str)]
    if len(good) != len(texts):
        raise invalid_field("documents", "documents must be texts, or objects with a text.")
    return good


def _ranked(result: pb.DocumentResult, documents: Sequence[str], shown: bool) -> dict[str, Any]:
    if not 0 <= result.index < len(documents):
        raise ApiError(
            502, f"The backend ranked document {result.index}, which is not in the request.", code="backend_failed"
        )
    row: dict[str, Any] = {"index": result.index, "relevance_score": result.relevance_score}
    return row | {"document": {"text": result.text or documents[result.index]}} if shown else row
