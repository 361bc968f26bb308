"""An ingress in a process of its own, which a test can stop: its replicas take requests and never answer.

Prints its port, then a line for each request. `ingress_process.py PATH`: on a unix socket, where it prints 0.
"""

from __future__ import annotations

import socketserver
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        _say(f"came {self.path}")
        threading.Event().wait()

    def log_message(self, format: str, *args: object) -> None:
        pass


class _UnixServer(socketserver.ThreadingUnixStreamServer):
    daemon_threads = True


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    server: socketserver.BaseServer
    if len(sys.argv) > 1:
        server = _UnixServer(sys.argv[1], _Handler)
        _say("0")
    else:
        server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
        server.daemon_threads = True
        _say(str(server.server_port))
    server.serve_forever()
