"""Indexes and manifests, challenges and logins: what registries and container tools write."""

from __future__ import annotations

import base64
import json
import time
from pathlib import Path

import pytest

from corral.blobs.errors import BadArchive, NoBuild
from corral.blobs.oci.challenge import Basic, Bearer, read_challenge
from corral.blobs.oci.credentials import DockerConfig, Login
from corral.blobs.oci.documents import (
    Config,
    Index,
    Manifest,
    check_platform,
    choose_image,
    read_config,
    read_document,
)
from corral.kit.errors import Invalid

A, B, C = ("sha256:" + letter * 64 for letter in "abc")


def index(*platforms: tuple[str, str, str]) -> bytes:
    manifests = [
        {
            "mediaType": "application/vnd.oci.image.manifest.v1+json",
            "digest": digest,
            "size": 5,
            "platform": {"os": os, "architecture": arch},
        }
        for os, arch, digest in platforms
    ]
    return json.dumps({"schemaVersion": 2, "manifests": manifests}).encode()


def manifest(**changes: object) -> bytes:
    layer = {"mediaType": "application/vnd.oci.image.layer.v1.tar+gzip", "digest": B, "size": 7}
    document = {
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": {"mediaType": "application/vnd.oci.image.config.v1+json", "digest": A, "size": 2},
        "layers": [layer | changes],
    }
    return json.dumps(document).encode()


def test_an_index_tells_its_platforms() -> None:
    found = read_document(index(("linux", "amd64", A), ("linux", "arm64", B), ("unknown", "unknown", C)), C, "x")
    assert isinstance(found, Index)
    assert found.platforms == ("linux/amd64", "linux/arm64")  # a signature's pseudo-platform is none
    assert choose_image(found, "linux/arm64", "x").digest == B


def test_no_build_for_the_platform() -> None:
    found = read_document(index(("linux", "amd64", A)), C, "x")
    assert isinstance(found, Index)
    with pytest.raises(NoBuild, match="no linux/arm64 build of x; it is made for linux/amd64"):
        choose_image(found, "linux/arm64", "x")


def test_a_variant_does_unless_there_is_an_exact_one() -> None:
    document = json.loads(index(("linux", "arm64", A), ("linux", "arm64", B)))
    document["manifests"][0]["platform"]["variant"] = "v8"
    found = read_document(json.dumps(document).encode(), C, "x")
    assert isinstance(found, Index)
    assert choose_image(found, "linux/arm64", "x").digest == B
    document["manifests"].pop()
    found = read_document(json.dumps(document).encode(), C, "x")
    assert isinstance(found, Index)
    assert choose_image(found, "linux/arm64", "x").digest == A
    with pytest.raises(NoBuild):
        choose_image(found, "linux/arm", "x")


def test_a_manifest_tells_its_layers() -> None:
    found = read_document(manifest(), C, "x")
    assert isinstance(found, Manifest)
    assert [(layer.digest, layer.size) for layer in found.layers] == [(B, 7)]
    assert found.size_bytes == 7


@pytest.mark.parametrize(
    "changes",
    [
        {"mediaType": "application/vnd.docker.image.rootfs.foreign.diff.tar.gzip"},
        {"mediaType": "application/vnd.oci.image.layer.nondistributable.v1.tar+gzip"},
        {"urls": ["https://elsewhere.example/layer"]},
        {"mediaType": "application/vnd.ollama.image.model"},
        {"size": -1},
    ],
)
def test_layers_we_do_not_take(changes: dict[str, object]) -> None:
    with pytest.raises(BadArchive):
        read_document(manifest(**changes), C, "x")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"{}",
        b'{"schemaVersion": 1, "layers": []}',
        b'{"schemaVersion": 2}',
        b'{"schemaVersion": 2, "layers": []}',
        b'{"schemaVersion": 2, "layers": [], "manifests": [], "config": {"digest": "x"}}',
        b'{"schemaVersion": 2, "manifests": 7}',
        b"\xff\xfe",
        b"[" * 100_000,
    ],
)
def test_what_is_no_image(body: bytes) -> None:
    with pytest.raises(BadArchive):
        read_document(body, C, "x")


def test_a_digest_that_is_a_path_is_refused() -> None:
    with pytest.raises(Invalid):
        read_document(manifest(digest="sha256:../../x"), C, "x")
    with pytest.raises(Invalid):
        read_document(index(("linux", "amd64", "../x")), C, "x")


def test_an_image_says_itself_what_it_is_made_for() -> None:
    config = read_config(b'{"os": "linux", "architecture": "arm64", "variant": "v8", "rootfs": {"diff_ids": []}}', "x")
    assert config.platform == "linux/arm64/v8"
    check_platform(config, "linux/arm64", "x")
    check_platform(Config(), "linux/amd64", "x")
    with pytest.raises(NoBuild):
        check_platform(config, "linux/amd64", "x")


@pytest.mark.parametrize(
    ("header", "challenge"),
    [
        (
            'Bearer realm="https://auth.example/token",service="registry.example",scope="repository:a/b:pull"',
            Bearer("https://auth.example/token", "registry.example", "repository:a/b:pull"),
        ),
        ('bearer Realm="https://x/t" , service=y', Bearer("https://x/t", "y")),
        (
            'Bearer realm="https://x/t",scope="repository:a:pull,push"',
            Bearer("https://x/t", "", "repository:a:pull,push"),
        ),
        ('Bearer realm="a\\"b"', Bearer('a"b')),
        ('Basic realm="registry"', Basic()),
        ('Basic realm="r", Bearer realm="https://x/t"', Bearer("https://x/t")),
        ("Negotiate", None),
        ("Bearer", None),
        ("", None),
        ('=,,"', None),
    ],
)
def test_what_a_registry_wants_to_see(header: str, challenge: object) -> None:
    assert read_challenge(header) == challenge


def config_with(tmp_path: Path, content: object) -> DockerConfig:
    (tmp_path / "config.json").write_text(json.dumps(content))
    return DockerConfig({"DOCKER_CONFIG": str(tmp_path), "PATH": str(tmp_path)})


async def test_logins_of_the_container_tools(tmp_path: Path) -> None:
    auth = base64.b64encode(b"ann:secret:with:colons").decode()
    config = config_with(
        tmp_path,
        {
            "auths": {
                "one.example": {"auth": auth},
                "https://two.example": {"username": "bob", "password": "p"},
                "three.example": {"identitytoken": "t"},
                "broken.example": {"auth": "%%%"},
            }
        },
    )
    assert await config.find("one.example") == Login("ann", "secret:with:colons")
    assert await config.find("two.example") == Login("bob", "p")
    assert await config.find("three.example") == Login("", "t", is_token=True)
    assert await config.find("broken.example") is None
    assert await config.find("unknown.example") is None


async def test_the_public_hubs_login_has_a_name_of_its_own(tmp_path: Path) -> None:
    hub = "docker" + ".io"
    auth = base64.b64encode(b"ann:s").decode()
    config = config_with(tmp_path, {"auths": {f"https://index.{hub}/v1/": {"auth": auth}}})
    assert await config.find(hub) == Login("ann", "s")


async def test_a_helper_is_asked(tmp_path: Path) -> None:
    helper = tmp_path / "docker-credential-test"
    helper.write_text('#!/bin/sh\nread host\nprintf \'{"Username":"%s","Secret":"s"}\' "$host"\n')
    helper.chmod(0o755)
    config = config_with(tmp_path, {"credHelpers": {"one.example": "test"}})
    assert await config.find("one.example") == Login("one.example", "s")
    assert await config.find("two.example") is None


@pytest.mark.parametrize("script", ["exit 1", "echo nonsense", "sleep 60", "echo '{}'"])
async def test_a_helper_that_fails_means_no_login(tmp_path: Path, script: str) -> None:
    helper = tmp_path / "docker-credential-test"
    helper.write_text(f"#!/bin/sh\nPATH=/usr/bin:/bin\n{script}\n")
    helper.chmod(0o755)
    (tmp_path / "config.json").write_text('{"credsStore": "test"}')
    config = DockerConfig({"DOCKER_CONFIG": str(tmp_path), "PATH": str(tmp_path)}, helper_timeout_s=0.2)
    assert await config.find("one.example") is None


async def test_a_helpers_name_is_no_path(tmp_path: Path) -> None:
    config = config_with(tmp_path, {"credsStore": "../../bin/sh"})
    assert await config.find("one.example") is None


async def test_an_unreadable_config_means_no_login(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    assert await DockerConfig({"DOCKER_CONFIG": str(tmp_path)}).find("x") is None
    assert await DockerConfig({"HOME": str(tmp_path / "nowhere")}).find("x") is None


def test_a_password_is_not_shown() -> None:
    assert "secret" not in repr(Login("ann", "secret"))


@pytest.mark.parametrize("filler", [" ", "a", "a ", ", ", 'Bearer realm="', "\t,"])
def test_no_challenge_takes_long_to_read(filler: str) -> None:
    began = time.process_time()
    read_challenge(filler * (100_000 // len(filler)) + "!")
    assert time.process_time() - began < 2
