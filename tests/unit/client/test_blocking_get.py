"""One GET without asyncio gives up as a whole, not piece by piece."""

from __future__ import annotations

import socket
import threading

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
            assert get(Endpoint(f"http://127.0.0.1:{listening.getsockname()[1]}", "key"), "/api/nodes", 0.3) is None
        finally:
            over.set()
            dripping.join()
