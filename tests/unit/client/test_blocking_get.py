"""One GET without asyncio gives up as a whole, not piece by piece."""

from __future__ import annotations

import socket
import threading

import pytest

from corral.cli import lists
from corral.client.blocking_get import get
from corral.client.endpoint import Endpoint


def test_a_server_that_sends_a_byte_now_and_then_is_not_waited_for() -> None:
    over = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def drip() -> None:
            connection, _ = listening.accept()
            with connection:
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
                while not over.wait(0.02):
                    try:
                        connection.sendall(b"x")
                    except OSError:
                        return

        dripping = threading.Thread(target=drip)
        dripping.start()
        try:
            with pytest.raises(TimeoutError):
                get(Endpoint(f"http://127.0.0.1:{listening.getsockname()[1]}", "key"), "/api/nodes", 0.3)
        finally:
            over.set()
            dripping.join()


def test_a_list_of_a_fleet_that_is_silent_ends_with_one_error_and_asks_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A stopped process still takes connections: its kernel does."""
    read_rows = lists.read_rows
    monkeypatch.setattr(lists, "read_rows", lambda *given: read_rows(*given, timeout_s=0.2))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        assert lists.print_list(["nodes", "list", "--url", url, "--key", "k"]) == 1
        silent.settimeout(5)
        silent.accept()[0].close()
        silent.setblocking(False)
        with pytest.raises(BlockingIOError):
            silent.accept()
    assert f"{url} did not answer in time: try again, or see `corral doctor`" in capsys.readouterr().err
