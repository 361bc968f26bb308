"""An S3 server of the test's own (`moto`), seen from outside by plain HTTP: it does not verify signatures."""

from __future__ import annotations

import contextlib
import logging
import re
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from urllib.parse import quote

from corral.blobs.storage_settings import StorageSettings

BUCKET = "localai"
HEADERS = {
    "authorization": "AWS4-HMAC-SHA256 Credential=a/20260101/us-east-1/s3/aws4_request, SignedHeaders=x, Signature=0",
    "content-type": "application/octet-stream",
}


@dataclass(frozen=True)
class ObjectStorage:
    url: str

    @property
    def settings(self) -> StorageSettings:
        return StorageSettings(
            storage_url=self.url, storage_bucket=BUCKET, storage_access_key="access", storage_secret_key="secret"
        )

    @property
    def flags(self) -> list[str]:
        """The same for a command."""
        return ["--storage-url", self.url, "--storage-access-key", "access", "--storage-secret-key", "secret"]

    def put(self, key: str, content: bytes, **metadata: str) -> None:
        names = {f"x-amz-meta-{name.replace('_', '-')}": value for name, value in metadata.items()}
        self.call("PUT", key, content, names)

    def read(self, key: str) -> bytes:
        return self.call("GET", key)[0]

    def metadata(self, key: str) -> dict[str, str]:
        headers = self.call("HEAD", key)[1]
        return {name.removeprefix("x-amz-meta-"): value for name, value in headers.items() if "x-amz-meta-" in name}

    def list_keys(self) -> list[str]:
        listing = self.call("GET", "", query="?list-type=2")[0].decode()
        return re.findall("<Key>(.*?)</Key>", listing)

    def unfinished_uploads(self) -> list[str]:
        listing = self.call("GET", "", query="?uploads")[0].decode()
        return re.findall("<Key>(.*?)</Key>", listing)

    def call(
        self, method: str, key: str, body: bytes | None = None, headers: dict[str, str] | None = None, query: str = ""
    ) -> tuple[bytes, dict[str, str]]:
        where = f"{self.url}/{BUCKET}/{quote(key)}{query}" if key else f"{self.url}/{BUCKET}{query}"
        request = urllib.request.Request(where, data=body, method=method, headers=HEADERS | (headers or {}))
        with urllib.request.urlopen(request, timeout=20) as response:
            return response.read(), {name.lower(): value for name, value in response.headers.items()}


@contextlib.contextmanager
def open_object_storage() -> Iterator[ObjectStorage]:
    from moto.server import ThreadedMotoServer  # a second of imports, for the processes that need one only

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        storage = ObjectStorage(f"http://{host}:{port}")
        with urllib.request.urlopen(urllib.request.Request(f"{storage.url}/moto-api/reset", method="POST"), timeout=20):
            pass  # the content outlives a server of this process
        storage.call("PUT", "")
        yield storage
    finally:
        server.stop()
