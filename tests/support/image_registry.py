"""A real image registry (Debian's docker-registry), and images made by the test.

with running_registry(folder) as registry:
    image = push_image(registry.url, "demo/backend", "1", {"linux/amd64": [layer({"run.sh": b"..."})]})
    reference = f"{registry.host}/demo/backend:1"

Images are written by hand over HTTP: what a real tool would refuse to make can be made here too.
"""

from __future__ import annotations

import base64
import contextlib
import gzip
import hashlib
import io
import json
import os
import shutil
import subprocess
import tarfile
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature
from cryptography.x509.oid import NameOID

from tests.support.bad_line import Line
from tests.support.processes import Process, clean_env, free_port
from tests.support.waiting import wait_for

ROOT = Path(__file__).parents[2]
OCI_INDEX = "application/vnd.oci.image.index.v1+json"
OCI_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
OCI_CONFIG = "application/vnd.oci.image.config.v1+json"
OCI_LAYER = "application/vnd.oci.image.layer.v1.tar+gzip"
DOCKER_LIST = "application/vnd.docker.distribution.manifest.list.v2+json"
DOCKER_MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"
DOCKER_CONFIG = "application/vnd.docker.container.image.v1+json"
DOCKER_LAYER = "application/vnd.docker.image.rootfs.diff.tar.gzip"

# htpasswd -nbB ann secret; made once, as bcrypt is not in the standard library
HTPASSWD = "ann:$2y$05$OpOcSSU7VMPAr7CFbFCOKuVn6haCFqN1SMUH2.hKM7Euap0mCqWia"


def digest_of(data: bytes) -> str:
    return "sha256:" + hashlib.sha256(data).hexdigest()


# Registries


@dataclass
class ImageRegistry:
    port: int
    process: Process

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def url(self) -> str:
        return f"http://{self.host}"


def need_registry() -> str:
    """The program, installed if we may; else the test is skipped with the reason."""
    if shutil.which("docker-registry") is None:
        subprocess.run([ROOT / "scripts" / "_debian", "docker-registry"], check=False)
    found = shutil.which("docker-registry")
    if found is None:
        pytest.skip("needs Debian's docker-registry (apt-get install docker-registry)")
    return found


@contextlib.contextmanager
def running_registry(
    folder: Path, *, auth: Mapping[str, Any] | None = None, port: int | None = None
) -> Iterator[ImageRegistry]:
    """`auth` is that section of its configuration; see `basic_auth` and `TokenIssuer`."""
    program, port = need_registry(), port or free_port()
    folder.mkdir(parents=True, exist_ok=True)
    config: dict[str, Any] = {
        "version": 0.1,
        "log": {"level": "error"},
        "storage": {"filesystem": {"rootdirectory": str(folder / "data")}, "delete": {"enabled": True}},
        "http": {"addr": f"127.0.0.1:{port}"},
    }
    if auth is not None:
        config["auth"] = auth
    (folder / "config.yml").write_text(json.dumps(config))  # JSON is YAML
    process = Process([program, "serve", str(folder / "config.yml")], clean_env(folder), folder / "log")
    try:
        registry = ImageRegistry(port, process)
        wait_for(lambda: _answers(registry.url), "registry")
        yield registry
    finally:
        process.close()


def basic_auth(folder: Path) -> dict[str, Any]:
    """User ann, password secret."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "htpasswd").write_text(HTPASSWD + "\n")
    return {"htpasswd": {"realm": "test", "path": str(folder / "htpasswd")}}


class TokenIssuer:
    """Gives out bearer tokens, to ann with her password or to anybody, as the big registries do.

    async with TokenIssuer(folder) as issuer:
        with running_registry(folder, auth=issuer.auth) as registry: ...
    """

    def __init__(self, folder: Path, *, anonymous: bool = True, lasts_s: int = 300) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.anonymous = anonymous
        self.lasts_s = lasts_s
        self.given = 0
        self.refused = 0
        self.port = free_port()
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._certificate = _self_signed(self._key)
        self._bundle = folder / "issuer.pem"
        self._bundle.write_bytes(self._certificate.public_bytes(serialization.Encoding.PEM))
        self._runner: web.AppRunner | None = None

    @property
    def auth(self) -> dict[str, Any]:
        place = {"realm": f"http://127.0.0.1:{self.port}/token", "service": "test", "issuer": "test"}
        return {"token": place | {"rootcertbundle": str(self._bundle)}}

    def push_header(self, repository: str) -> dict[str, str]:
        return {"Authorization": f"Bearer {self._token(repository, ['pull', 'push'])}"}

    async def __aenter__(self) -> TokenIssuer:
        app = web.Application()
        app.router.add_get("/token", self._give)
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port).start()
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._runner is not None
        await self._runner.cleanup()

    async def _give(self, request: web.Request) -> web.Response:
        known = request.headers.get("Authorization", "") == login_header()["Authorization"]
        if not known and not self.anonymous:
            self.refused += 1
            return web.Response(status=401)
        self.given += 1
        repository = request.query["scope"].split(":")[1]
        return web.json_response({"token": self._token(repository, ["pull"]), "expires_in": self.lasts_s})

    def _token(self, repository: str, actions: list[str]) -> str:
        now = int(time.time())
        der = self._certificate.public_bytes(serialization.Encoding.DER)
        header = {"typ": "JWT", "alg": "ES256", "x5c": [base64.b64encode(der).decode()]}
        claims = {
            "iss": "test",
            "sub": "",
            "aud": "test",
            "exp": now + self.lasts_s,
            "nbf": now - 10,
            "iat": now,
            "jti": os.urandom(8).hex(),
            "access": [{"type": "repository", "name": repository, "actions": actions}],
        }
        signed = b".".join(_b64(json.dumps(part).encode()) for part in (header, claims))
        r, s = decode_dss_signature(self._key.sign(signed, ec.ECDSA(hashes.SHA256())))
        return (signed + b"." + _b64(r.to_bytes(32, "big") + s.to_bytes(32, "big"))).decode()


def _b64(data: bytes) -> bytes:
    return base64.urlsafe_b64encode(data).rstrip(b"=")


def _self_signed(key: ec.EllipticCurvePrivateKey) -> x509.Certificate:
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "test")])
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + timedelta(hours=1))
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/v2/", timeout=2):
            return True
    except urllib.error.HTTPError as error:
        return error.code == 401


# Images


def layer(files: Mapping[str, bytes | str | None], *, compress: bool = True) -> bytes:
    """bytes: a file (executable); text: a link there; None: a folder. The same files give the same bytes."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.mode, info.mtime = 0o755, 1_600_000_000
            if content is None:
                info.type = tarfile.DIRTYPE
            elif isinstance(content, str):
                info.type, info.linkname = tarfile.SYMTYPE, content
            else:
                info.size = len(content)
            archive.addfile(info, io.BytesIO(content) if isinstance(content, bytes) else None)
    return gzip.compress(out.getvalue(), 1, mtime=0) if compress else out.getvalue()


def run_file(text: str = "one") -> bytes:
    return f"#!/bin/sh\n# {text}\n".encode()


@dataclass(frozen=True)
class MadeImage:
    """What is needed to serve or save an image: documents and blobs by digest."""

    digest: str  # of the index, or of the only manifest
    document: bytes
    media_type: str
    manifests: dict[str, tuple[str, bytes]]  # platform: digest, bytes
    blobs: dict[str, bytes]
    layers: dict[str, list[bytes]]


def make_image(
    platforms: Mapping[str, Sequence[bytes]], *, docker: bool = False, index: bool = True, note: str = ""
) -> MadeImage:
    """`platforms`: os/arch to layers, lowest first; exactly one without `index`. `note` changes the index only."""
    manifest_type, config_type, layer_type = (
        (DOCKER_MANIFEST, DOCKER_CONFIG, DOCKER_LAYER) if docker else (OCI_MANIFEST, OCI_CONFIG, OCI_LAYER)
    )
    blobs: dict[str, bytes] = {}
    manifests: dict[str, tuple[str, bytes]] = {}
    listed = []
    for platform, layers in platforms.items():
        os_name, arch = platform.split("/")
        plain = [digest_of(gzip.decompress(each)) if each[:2] == b"\x1f\x8b" else digest_of(each) for each in layers]
        config = json.dumps(
            {"os": os_name, "architecture": arch, "rootfs": {"type": "layers", "diff_ids": plain}, "config": {}}
        ).encode()
        blobs |= {digest_of(each): each for each in (*layers, config)}
        manifest = json.dumps(
            {
                "schemaVersion": 2,
                "mediaType": manifest_type,
                "config": {"mediaType": config_type, "digest": digest_of(config), "size": len(config)},
                "layers": [{"mediaType": layer_type, "digest": digest_of(each), "size": len(each)} for each in layers],
            }
        ).encode()
        manifests[platform] = (digest_of(manifest), manifest)
        listed.append(
            {
                "mediaType": manifest_type,
                "digest": digest_of(manifest),
                "size": len(manifest),
                "platform": {"os": os_name, "architecture": arch},
            }
        )
    packed = {platform: list(layers) for platform, layers in platforms.items()}
    if not index:
        ((digest, manifest),) = manifests.values()
        return MadeImage(digest, manifest, manifest_type, manifests, blobs, packed)
    index_type = DOCKER_LIST if docker else OCI_INDEX
    about: dict[str, Any] = {"schemaVersion": 2, "mediaType": index_type, "manifests": listed}
    if note:
        about["annotations"] = {"note": note}
    document = json.dumps(about).encode()
    return MadeImage(digest_of(document), document, index_type, manifests, blobs, packed)


def make_artifact(files: Mapping[str, bytes], media_type: str = "application/vnd.test.model") -> MadeImage:
    """Files as layers, each named by an annotation, as ORAS pushes them."""
    empty = b"{}"
    layers = [
        {
            "mediaType": media_type,
            "digest": digest_of(data),
            "size": len(data),
            "annotations": {"org.opencontainers.image.title": name},
        }
        for name, data in files.items()
    ]
    config = {"mediaType": "application/vnd.oci.empty.v1+json", "digest": digest_of(empty), "size": len(empty)}
    about = {"schemaVersion": 2, "mediaType": OCI_MANIFEST, "config": config, "layers": layers}
    document = json.dumps(about).encode()
    blobs = {digest_of(data): data for data in (*files.values(), empty)}
    whole = {"": (digest_of(document), document)}
    return MadeImage(digest_of(document), document, OCI_MANIFEST, whole, blobs, {})


def push_image(url: str, repository: str, tag: str, image: MadeImage, headers: Mapping[str, str] | None = None) -> None:
    for digest, data in image.blobs.items():
        _push_blob(url, repository, digest, data, headers or {})
    manifest_type = json.loads(next(iter(image.manifests.values()))[1])["mediaType"]
    for digest, manifest in image.manifests.values():
        _put_manifest(url, repository, digest, manifest, manifest_type, headers or {})
    _put_manifest(url, repository, tag, image.document, image.media_type, headers or {})


def _push_blob(url: str, repository: str, digest: str, data: bytes, headers: Mapping[str, str]) -> None:
    begin = urllib.request.Request(f"{url}/v2/{repository}/blobs/uploads/", method="POST", headers=dict(headers))
    with urllib.request.urlopen(begin, timeout=60) as answer:
        place = answer.headers["Location"]
    joint = "&" if "?" in place else "?"
    put = urllib.request.Request(
        f"{place}{joint}digest={digest}",
        data=data,
        method="PUT",
        headers={"Content-Type": "application/octet-stream", **headers},
    )
    with urllib.request.urlopen(put, timeout=60):
        pass


def _put_manifest(
    url: str, repository: str, name: str, document: bytes, media_type: str, headers: Mapping[str, str]
) -> None:
    put = urllib.request.Request(
        f"{url}/v2/{repository}/manifests/{name}",
        data=document,
        method="PUT",
        headers={"Content-Type": media_type, **headers},
    )
    with urllib.request.urlopen(put, timeout=60):
        pass


def login_header(user: str = "ann", password: str = "secret") -> dict[str, str]:
    return {"Authorization": "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()}


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ImageRegistry]:
    """One for all tests of a module: each uses repositories of its own."""
    with running_registry(tmp_path_factory.mktemp("registry")) as found:
        yield found


@pytest.fixture
async def line(registry: ImageRegistry) -> AsyncIterator[Line]:
    async with Line(registry.port) as line:
        yield line


def save_image(path: Path, image: MadeImage, *, layout: str = "oci") -> None:
    """As a tar file: `oci` layout, or what `docker save` writes (one platform)."""
    with tarfile.open(path, "w") as archive:

        def add(name: str, data: bytes) -> None:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))

        if layout == "oci":
            add("oci-layout", b'{"imageLayoutVersion":"1.0.0"}')
            described = {"mediaType": image.media_type, "digest": image.digest, "size": len(image.document)}
            add("index.json", json.dumps({"schemaVersion": 2, "manifests": [described]}).encode())
            documents = dict(image.manifests.values()) | {image.digest: image.document}
            for digest, data in (image.blobs | documents).items():
                add("blobs/" + digest.replace(":", "/"), data)
            return
        ((_, manifest),) = image.manifests.values()
        (layers,) = image.layers.values()
        config = image.blobs[json.loads(manifest)["config"]["digest"]]
        names = []
        for number, data in enumerate(layers):
            names.append(f"{number}/layer.tar")
            add(names[-1], gzip.decompress(data))
        add("config.json", config)
        saved = [{"Config": "config.json", "RepoTags": ["x:1"], "Layers": names}]
        add("manifest.json", json.dumps(saved).encode())
