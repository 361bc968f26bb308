"""`/v1/…` over a real socket: keys, models, bodies, and the words OpenAI's clients understand."""

from __future__ import annotations

import asyncio
import gzip
import json
from dataclasses import dataclass, field

import aiohttp
import openai
import pytest
from yarl import URL

from corral.contract.http import Target
from corral.gateway.main import Gateway
from corral.gateway.responses import Response
from corral.gateway.routing.replicas import Route
from corral.gateway.routing.request import RouteRequest
from tests.integration.gateway.conftest import ADMIN, LIMITED, USER, VIEWER, OpenGateway, bearer
from tests.integration.gateway.raw_client import exchange, status_of
from tests.integration.gateway.scripted_controller import ScriptedController, key

CHAT = "/v1/chat/completions"


async def error_of(answer: aiohttp.ClientResponse) -> dict[str, object]:
    body = await answer.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    return {"status": answer.status, **body["error"]}


async def test_the_openai_client_lists_models(gateway: Gateway) -> None:
    async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key=USER, max_retries=0) as client:
        assert [model.id async for model in client.models.list()] == ["small", "org/large"]
        assert (await client.models.retrieve("small")).owned_by == "corral"
        with pytest.raises(openai.NotFoundError) as missing:
            await client.models.retrieve("none")
        assert missing.value.code == "model_not_found"
        with pytest.raises(openai.NotFoundError, match="does not exist"):
            await client.chat.completions.create(model="none", messages=[{"role": "user", "content": "hi"}])
    async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="ck_wrong", max_retries=0) as stranger:
        with pytest.raises(openai.AuthenticationError) as refused:
            await stranger.models.list()
        assert refused.value.code == "invalid_api_key"


@pytest.mark.parametrize(
    ("secret", "listed"),
    [
        (ADMIN, ["small", "org/large"]),
        (VIEWER, ["small", "org/large"]),
        (USER, ["small", "org/large"]),
        (LIMITED, ["small"]),
    ],
)
async def test_each_key_sees_its_models(
    gateway: Gateway, http: aiohttp.ClientSession, secret: str, listed: list[str]
) -> None:
    for headers in (bearer(secret), {"x-api-key": secret}):
        async with http.get(f"{gateway.url}/v1/models", headers=headers) as answer:
            assert answer.status == 200
            assert [model["id"] for model in (await answer.json())["data"]] == listed
    for name, path in (("small", "small"), ("org/large", "org/large"), ("org/large", "org%2Flarge")):
        async with http.get(f"{gateway.url}/v1/models/{path}", headers=bearer(secret)) as answer:
            assert answer.status == (200 if name in listed else 404)
    async with http.head(f"{gateway.url}/v1/models", headers=bearer(secret)) as answer:
        assert answer.status == 200
        assert int(answer.headers["Content-Length"]) > 0


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/small", CHAT, "/v1/nothing", "/v1/", "/v1", "/metrics"])
async def test_nobody_gets_in_without_a_key(gateway: Gateway, http: aiohttp.ClientSession, path: str) -> None:
    for headers in ({}, {"Authorization": "Basic abc"}, bearer("ck_wrong"), {"x-api-key": ""}):
        async with http.get(f"{gateway.url}{path}", headers=headers) as answer:
            assert (await error_of(answer))["status"] == 401
            assert "Bearer" in answer.headers["WWW-Authenticate"]


async def test_unknown_paths_and_wrong_methods(gateway: Gateway, http: aiohttp.ClientSession) -> None:
    async with http.get(f"{gateway.url}/v1/nothing", headers=bearer(USER)) as answer:
        assert await error_of(answer) == {
            "status": 404,
            "message": "Invalid URL (GET /v1/nothing): no route has this path, and the request names no `model`, "
            "in a JSON body or as ?model=NAME.",
            "type": "invalid_request_error",
            "param": None,
            "code": "unknown_url",
        }
    async with http.get(f"{gateway.url}{CHAT}", headers=bearer(USER)) as answer:
        assert (await error_of(answer))["status"] == 405
        assert answer.headers["Allow"] == "POST"
    async with http.delete(f"{gateway.url}/v1/models/small", headers=bearer(USER)) as answer:
        assert (await error_of(answer))["status"] == 405


@pytest.mark.parametrize("path", [CHAT, "/v1/models", "/api/nodes", "/"])
@pytest.mark.parametrize("method", ["TRACE", "PROPFIND", "BREW"])
async def test_unknown_methods_are_answered_here(
    gateway: Gateway, http: aiohttp.ClientSession, method: str, path: str
) -> None:
    async with http.request(method, f"{gateway.url}{path}", headers=bearer(USER)) as answer:
        assert answer.status == 501
        assert (await answer.json())["error"]["code"] == 501


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("/chat/completions", CHAT),
        ("/v1/v1/chat/completions", CHAT),
        ("/v1/chat/completions/", CHAT),
        ("//v1/embeddings", "/v1/embeddings"),
        ("/v1/v1/models", "/v1/models"),
        ("/models", "/v1/models"),
    ],
)
async def test_a_base_url_gone_wrong_is_told_as_such(
    gateway: Gateway, http: aiohttp.ClientSession, path: str, meant: str
) -> None:
    url = URL(f"{gateway.url}{path}", encoded=True)
    async with http.post(url, headers=bearer(USER), json={"model": "small"}) as answer:
        error = await error_of(answer)
    assert (error["status"], error["code"]) == (404, "unknown_url")
    assert (
        error["message"] == f"Invalid URL (POST {path}): the path is {meant}. The base URL of a client ends with /v1."
    )
    async with http.post(url, json={"model": "small"}) as answer:
        assert (await error_of(answer))["status"] == 401


async def test_a_list_with_a_slash_at_its_end_is_the_list(gateway: Gateway, http: aiohttp.ClientSession) -> None:
    async with http.get(f"{gateway.url}/v1/models/", headers=bearer(USER)) as answer:
        assert [model["id"] for model in (await answer.json())["data"]] == ["small", "org/large"]


async def test_near_names_are_told_to_keys_with_a_list_too(gateway: Gateway, http: aiohttp.ClientSession) -> None:
    async with http.post(f"{gateway.url}{CHAT}", headers=bearer(LIMITED), json={"model": "smal"}) as answer:
        assert "Did you mean `small`?" in str((await error_of(answer))["message"])
    async with http.post(f"{gateway.url}{CHAT}", headers=bearer(LIMITED), json={"model": "org/larg"}) as answer:
        assert "mean" not in str((await error_of(answer))["message"]), "of what it may use"
    async with http.get(f"{gateway.url}/v1/models/org%2Flarg", headers=bearer(USER)) as answer:
        assert "Did you mean `org/large`?" in str((await error_of(answer))["message"])


async def test_a_compressed_body_is_told_as_such(gateway: Gateway, http: aiohttp.ClientSession) -> None:
    packed = gzip.compress(b'{"model":"small","messages":[]}')
    headers = {**bearer(USER), "Content-Encoding": "gzip"}
    async with http.post(f"{gateway.url}{CHAT}", headers=headers, data=packed) as answer:
        error = await error_of(answer)
        assert answer.headers["Accept-Encoding"] == "identity"
    assert (error["status"], error["code"]) == (415, "unsupported_encoding")
    assert "Send it uncompressed." in str(error["message"])


@pytest.mark.parametrize(
    ("body", "status", "param", "words"),
    [
        (b'{"model":"none","messages":[]}', 404, "model", "does not exist"),
        (b'{"messages":[]}', 400, "model", "must provide a `model`"),
        (b'{"model":"a","model":"b"}', 400, "model", "given twice"),
        (b'{"model":7}', 400, "model", "must be a string"),
        (b'{"model":', 400, None, "not JSON"),
        (b"", 400, None, "the body is empty"),
        (b"[1]", 400, None, "JSON object"),
    ],
)
async def test_a_body_is_read_as_far_as_it_must(
    gateway: Gateway, http: aiohttp.ClientSession, body: bytes, status: int, param: str | None, words: str
) -> None:
    async with http.post(f"{gateway.url}{CHAT}", headers=bearer(USER), data=body) as answer:
        error = await error_of(answer)
    assert (error["status"], error["param"]) == (status, param)
    assert words in str(error["message"])


async def test_without_models_that_is_what_is_said(
    controller: ScriptedController, open_one: OpenGateway, http: aiohttp.ClientSession
) -> None:
    controller.change(models=[])
    async with open_one() as gateway:
        await gateway.views.run_once()
        async with http.post(f"{gateway.url}{CHAT}", headers=bearer(USER), json={"model": "m"}) as answer:
            error = await error_of(answer)
    assert (error["status"], error["code"]) == (404, "model_not_found")
    assert "no model is installed" in str(error["message"])


async def test_roles_and_model_lists_bound_what_is_used(gateway: Gateway, http: aiohttp.ClientSession) -> None:
    async with http.post(f"{gateway.url}{CHAT}", headers=bearer(VIEWER), json={"model": "small"}) as answer:
        error = await error_of(answer)
        assert (error["status"], error["code"]) == (403, "insufficient_permissions")
    async with http.post(f"{gateway.url}{CHAT}", headers=bearer(LIMITED), json={"model": "org/large"}) as answer:
        assert (await error_of(answer))["code"] == "model_not_found"
    multipart = aiohttp.FormData({"model": "org/large"}, default_to_multipart=True)
    async with http.post(f"{gateway.url}/v1/audio/transcriptions", headers=bearer(LIMITED), data=multipart) as answer:
        assert (await error_of(answer))["code"] == "model_not_found"


@pytest.mark.parametrize("declared", [True, False])
async def test_a_body_that_is_too_large_is_refused(
    controller: ScriptedController, open_one: OpenGateway, declared: bool
) -> None:
    head = f"POST {CHAT} HTTP/1.1\r\nHost: h\r\nAuthorization: Bearer {USER}\r\n"
    if declared:  # refused before a byte of it is sent
        request = head + "Content-Length: 1001\r\n\r\n"
    else:
        request = head + "Transfer-Encoding: chunked\r\n\r\n" + "1f4\r\n" + "x" * 500 + "\r\n" + "1f5\r\n" + "x" * 501
    async with open_one(body_limit_bytes=1000) as gateway:
        await gateway.views.run_once()
        answer = await exchange(gateway.port, request.encode())
    assert status_of(answer) == 413
    assert b'"code":"request_too_large"' in answer


async def test_an_expired_key_is_refused_by_the_controllers_clock(
    controller: ScriptedController, open_one: OpenGateway, http: aiohttp.ClientSession
) -> None:
    # A controller whose clock is far ahead of this machine's.
    controller.server_time = 9_000_000_000.0
    controller.keys = [
        key("ck_over", "inference", expires_at=8_999_999_999.0),
        key("ck_valid", "inference", expires_at=9_000_003_600.0),
    ]
    async with open_one() as gateway:
        await gateway.views.run_once()
        for secret, status in (("ck_over", 401), ("ck_valid", 200)):
            async with http.get(f"{gateway.url}/v1/models", headers=bearer(secret)) as answer:
                assert answer.status == status


async def test_browsers_are_answered_where_their_origin_is_allowed(
    controller: ScriptedController, open_one: OpenGateway, http: aiohttp.ClientSession
) -> None:
    origin = {"Origin": "https://a.example"}
    async with open_one(cors_origins=("https://a.example",)) as gateway:
        await gateway.views.run_once()
        ask = {**origin, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
        for path in (CHAT, "/v1/models"):
            async with http.options(f"{gateway.url}{path}", headers=ask) as answer:
                assert answer.status == 204
                assert answer.headers["Access-Control-Allow-Origin"] == "https://a.example"
                assert answer.headers["Access-Control-Allow-Headers"] == "authorization"
        async with http.get(f"{gateway.url}/v1/models", headers={**origin, **bearer(USER)}) as answer:
            assert answer.headers["Access-Control-Allow-Origin"] == "https://a.example"
        async with http.get(f"{gateway.url}/v1/models", headers=origin) as answer:  # errors too, or pages see nothing
            assert answer.status == 401
            assert answer.headers["Access-Control-Allow-Origin"] == "https://a.example"
        async with http.get(f"{gateway.url}/api/nodes", headers=origin) as answer:  # never the controller's routes
            assert "Access-Control-Allow-Origin" not in answer.headers


@dataclass
class OneTarget:
    """A router that knows one replica."""

    target: Target
    requests: list[RouteRequest] = field(default_factory=list)

    async def route(self, request: RouteRequest) -> Route | Response:
        self.requests.append(request)
        return Route(self.target, b"/replicas/p1" + request.request.path, b"signed.token")


async def test_a_replica_gets_the_body_and_none_of_the_clients_secrets(
    controller: ScriptedController, open_one: OpenGateway, http: aiohttp.ClientSession
) -> None:
    # The scripted controller's echo stands in for a worker's ingress.
    router = OneTarget(Target(unix_path=str(controller.socket)))
    body = b'{ "model" : "small", "stream":true, "messages":[] }'
    secrets = {"x-api-key": "ck_other", "Cookie": "a=b", "Origin": "https://a.example", "X-Corral-Client": "1.2.3.4"}
    async with open_one(router=router, cors_origins=("*",)) as gateway:
        await gateway.views.run_once()
        async with http.post(f"{gateway.url}{CHAT}?x=1", headers={**bearer(USER), **secrets}, data=body) as answer:
            assert answer.status == 200
            assert answer.headers.getall("Access-Control-Allow-Origin") == ["*"]
    assert router.requests[0].model == "small"
    assert router.requests[0].client.key_id == f"id-{USER}"
    seen = controller.seen[-1]  # receipts have a route of their own
    assert (seen.method, seen.path, seen.body) == ("POST", f"/replicas/p1{CHAT}?x=1", body)
    assert seen.values("Authorization") == ["Bearer signed.token"]
    for name in ("x-api-key", "Cookie", "Origin", "X-Corral-Client", "X-Corral-Gateway", "X-Forwarded-Proto"):
        assert seen.values(name) == []
    assert not any(USER in value for _, value in seen.headers)


async def test_a_replica_that_is_not_there_is_told(
    controller: ScriptedController, open_one: OpenGateway, http: aiohttp.ClientSession
) -> None:
    router = OneTarget(Target(unix_path=str(controller.socket) + ".none"))
    async with open_one(router=router) as gateway:
        await gateway.views.run_once()
        async with http.post(f"{gateway.url}{CHAT}", headers=bearer(USER), json={"model": "small"}) as answer:
            error = await error_of(answer)
            assert (error["status"], error["type"]) == (503, "server_error")
            assert answer.headers["Retry-After"] == "2"


async def test_metrics_are_for_those_who_may_watch(gateway: Gateway, http: aiohttp.ClientSession) -> None:
    async with http.get(f"{gateway.url}/metrics", headers=bearer(USER)) as answer:
        assert answer.status == 403
    for secret in (VIEWER, ADMIN):
        async with http.get(f"{gateway.url}/metrics", headers=bearer(secret)) as answer:
            assert answer.status == 200
            lines = (await answer.text()).splitlines()
    assert 'corral_gateway_requests_total{route="own",status="403"} 1.0' in lines
    assert 'corral_gateway_requests_in_flight{route="own"} 1.0' in lines  # this one
    assert "corral_gateway_controller_reachable 1.0" in lines
    assert "corral_gateway_bus_connected 0.0" in lines
    assert "corral_gateway_view_keys 4.0" in lines


async def test_health_is_for_everybody(
    controller: ScriptedController, gateway: Gateway, http: aiohttp.ClientSession
) -> None:
    for path in ("/healthz", "/readyz"):
        async with http.get(f"{gateway.url}{path}") as answer:
            assert answer.status == 200
        async with http.head(f"{gateway.url}{path}?x=1") as answer:
            assert answer.status == 200
        async with http.post(f"{gateway.url}{path}") as answer:
            assert answer.status == 405
    assert controller.seen == []


async def test_many_requests_at_once_are_all_answered(gateway: Gateway, http: aiohttp.ClientSession) -> None:
    async def ask(number: int) -> int:
        body = json.dumps({"model": f"none-{number}", "pad": "x" * number * 100})
        async with http.post(f"{gateway.url}{CHAT}", headers=bearer(USER), data=body) as answer:
            assert f"none-{number}`" in str((await error_of(answer))["message"])
            return answer.status

    assert set(await asyncio.gather(*(ask(number) for number in range(200)))) == {404}
    assert gateway.metrics.routes["inference"].in_flight == 0  # type: ignore[index]
