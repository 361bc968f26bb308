"""Clients of a chaos run: they ask models at both gateways without end, and count what they got, by cause.

A client never retries: what it reports is what an application without any care of its own would have seen.
"""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from urllib.parse import urlsplit

from tests.support.network import Machine

TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Asked:
    model: str
    stream: bool
    weight: int
    max_tokens: int = 12
    echoes: bool = True  # the answer has the question in it: the mock's


@dataclass
class Tally:
    """Of all clients together."""

    answered: Counter[str] = field(default_factory=Counter)  # by model
    failed: Counter[str] = field(default_factory=Counter)  # by cause
    wrong: list[str] = field(default_factory=list)  # answers that are no answers to what was asked
    latencies_s: list[float] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def asked(self) -> int:
        return self.answered.total() + self.failed.total()


class RequestFailed(Exception):
    """Its message is the cause, in words that are the same each time."""


class Clients:
    def __init__(
        self, machine: Machine, urls: Sequence[str], key: str, asked: Sequence[Asked], *, seed: int, pause_s: float
    ) -> None:
        self.tally = Tally()
        self._machine = machine
        self._urls = urls
        self._key = key
        self._asked = asked
        self._seed = seed
        self._pause_s = pause_s

    def run(self, number: int, over: threading.Event) -> None:
        """In a thread of its own, on the machine of the clients."""
        self._machine.enter()
        chance = Random(f"{self._seed} client {number}")
        while not over.wait(chance.uniform(0, 2 * self._pause_s)):
            asked = chance.choices(self._asked, [each.weight for each in self._asked])[0]
            self._one(chance, asked, f"{number} {chance.randrange(10**9)}")

    def _one(self, chance: Random, asked: Asked, question: str) -> None:
        began = time.monotonic()
        try:
            text = self._request(chance.choice(self._urls), asked, question)
        except RequestFailed as error:
            with self.tally.lock:
                self.tally.failed[str(error)] += 1
            return
        with self.tally.lock:
            self.tally.answered[asked.model] += 1
            self.tally.latencies_s.append(time.monotonic() - began)
            if asked.echoes and question not in text:
                self.tally.wrong.append(f"{asked.model} was asked {question!r} and answered {text[:80]!r}")

    def _request(self, url: str, asked: Asked, question: str) -> str:
        place = urlsplit(url)
        assert place.hostname is not None
        connection = http.client.HTTPConnection(place.hostname, place.port, timeout=TIMEOUT_S)
        body = {
            "model": asked.model,
            "stream": asked.stream,
            "max_tokens": asked.max_tokens,
            "messages": [{"role": "user", "content": question}],
        }
        head = {"Authorization": f"Bearer {self._key}", "Content-Type": "application/json"}
        sent = False
        try:
            connection.request("POST", "/v1/chat/completions", json.dumps(body), head)
            sent = True
            answer = connection.getresponse()
            content = answer.read()
            if answer.status != 200:
                raise RequestFailed(cause_of(answer.status, content))
            return text_of(content, stream=asked.stream)
        except http.client.IncompleteRead as error:
            raise RequestFailed("broken off in the middle of the answer") from error
        except TimeoutError as error:
            raise RequestFailed(f"no answer within {TIMEOUT_S:.0f} s") from error
        except (http.client.HTTPException, OSError) as error:
            raise RequestFailed("connection lost" if sent else "no connection to the gateway") from error
        finally:
            connection.close()


def cause_of(status: int, content: bytes) -> str:
    try:
        error = json.loads(content)["error"]
        kind = error.get("code") or error.get("type") if isinstance(error, dict) else ""
    except (ValueError, KeyError):
        kind = ""
    return f"{status} {kind or 'without a code'}"


def text_of(content: bytes, *, stream: bool) -> str:
    """Raises RequestFailed for a stream that ends without its end."""
    if not stream:
        return str(json.loads(content)["choices"][0]["message"]["content"])
    lines = [line[6:] for line in content.decode().splitlines() if line.startswith("data: ")]
    if not lines or lines[-1] != "[DONE]":
        raise RequestFailed("broken off in the middle of the answer")
    events = [json.loads(line) for line in lines[:-1]]
    if any("error" in event for event in events):
        raise RequestFailed("broken off in the middle of the answer")
    return "".join(choice["delta"].get("content") or "" for event in events for choice in event.get("choices", ()))
