"""What a worker records of its own log: masked, bounded, from every thread, and nothing about its readers."""

from __future__ import annotations

import asyncio
import logging
import threading

import pytest

from corral.kit.log import configure_logging, get_log
from corral.worker.own_log import KEY, MAX_PARTS, MAX_TEXT, lines_of, record_own_log
from tests.support.waiting import until

log = get_log(__name__)


@pytest.fixture(autouse=True)
def _as_in_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", list(root.handlers))
    monkeypatch.setattr(root, "level", root.level)
    configure_logging(role="worker")


async def test_lines_are_those_of_the_console_without_time_and_colour() -> None:
    with record_own_log(10) as book:
        log.info("backend installed", backend="llama-cpp", took_s=2)
        logging.getLogger("a.library").warning("it is %s", "late")
        log.debug("not at this level")
    log.info("after the block")
    first, second = book.read(KEY)
    assert first.text.split() == ["[info", "]", "backend", "installed", "backend=llama-cpp", "role=worker", "took_s=2"]
    assert "\x1b" not in first.text
    assert "it is late" in second.text
    assert (first.stream, len(first.timestamp), first.timestamp[-1]) == ("stderr", 27, "Z")


async def test_secrets_are_masked() -> None:
    with record_own_log(10) as book:
        log.warning("joined", token="cj_abcdefghijklmnopqrstuvwx", url="https://me:s3cret@host/x")
        logging.getLogger("a.library").warning("Bearer abcdefghijk123456")
    text = "\n".join(line.text for line in book.read(KEY))
    assert "cj_***" in text
    assert "https://***@host/x" in text
    assert not any(secret in text for secret in ("abcdefghijkl", "s3cret", "abcdefghijk123456"))


async def test_the_last_lines_are_kept_and_long_ones_are_cut() -> None:
    with record_own_log(3) as book:
        for number in range(5):
            log.info("entry", number=number)
    assert [line.text.split("number=")[1].split()[0] for line in book.read(KEY)] == ["2", "3", "4"]
    assert len(lines_of("x" * 10_000, 0.0)[0].text) == MAX_TEXT
    assert len(lines_of("x\n" * 1_000, 0.0)) == MAX_PARTS


async def test_a_traceback_is_lines() -> None:
    with record_own_log(100) as book:
        try:
            raise ValueError("no such thing")
        except ValueError:
            log.exception("order failed")
    texts = [line.text for line in book.read(KEY)]
    assert "order failed" in texts[0]
    assert any("ValueError: no such thing" in text for text in texts[1:])
    assert not any("\n" in text for text in texts)


async def test_other_threads_log_too_and_a_follower_wakes_up() -> None:
    with record_own_log(100) as book:
        async with book.follow(KEY) as lines:
            threads = [threading.Thread(target=lambda: log.info("from a thread")) for _ in range(3)]
            for thread in threads:
                thread.start()
            async with asyncio.timeout(10):
                assert "from a thread" in (await anext(lines)).text
            await until(lambda: len(book.read(KEY)) == 3)
            for thread in threads:
                thread.join()
