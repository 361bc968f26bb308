"""A real registry: what a reference points to, platforms, logins, tokens, mirrors, a bad line."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from corral.blobs.errors import BadArchive, NoBuild, WrongDigest
from corral.blobs.oci.auth import RegistryAuth
from corral.blobs.oci.credentials import FixedLogins, Login
from corral.blobs.oci.registry import RegistryClient, RegistrySettings
from corral.blobs.transfer.remote import HttpTimeouts, TransferBroken, open_session
from corral.contract.sources import Registry
from corral.kit.clock import SystemClock
from corral.kit.errors import Denied, Failed, NotFound, Unreachable
from tests.support.bad_line import Line
from tests.support.blob_server import BlobServer
from tests.support.image_registry import (
    ImageRegistry,
    MadeImage,
    TokenIssuer,
    basic_auth,
    layer,
    line,
    login_header,
    make_image,
    push_image,
    registry,
    run_file,
    running_registry,
)
from tests.support.processes import free_port

__all__ = ["line", "registry"]  # fixtures

QUICK = RegistrySettings(tries=2, first_wait_s=0.01)


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with open_session(HttpTimeouts(connect_s=20.0, stall_s=20.0)) as session:
        yield session


@pytest.fixture
def client(session: aiohttp.ClientSession) -> RegistryClient:
    return RegistryClient(session, settings=QUICK)


def two_platforms(**how: bool | str) -> MadeImage:
    return make_image(
        {
            "linux/amd64": [layer({"run.sh": run_file("amd64")}), layer({"lib/x": b"1"})],
            "linux/arm64": [layer({"run.sh": run_file("arm64")})],
        },
        **how,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("docker", [False, True])
async def test_an_index_and_its_platforms(registry: ImageRegistry, client: RegistryClient, docker: bool) -> None:
    image = two_platforms(docker=docker)
    push_image(registry.url, "two", f"docker-{docker}", image)
    satisfied: Registry = client
    found = await satisfied.look_up(f"{registry.host}/two:docker-{docker}")
    assert found.digest == image.digest
    sizes = {platform: sum(map(len, layers)) for platform, layers in image.layers.items()}
    assert [(each.platform, each.digest, each.size) for each in found.images] == [
        (platform, digest, sizes[platform]) for platform, (digest, _) in image.manifests.items()
    ]


async def test_the_image_of_one_platform(registry: ImageRegistry, client: RegistryClient) -> None:
    image = two_platforms()
    push_image(registry.url, "one", "1", image)
    found = await client.resolve(f"{registry.host}/one:1", "linux/amd64")
    assert (found.digest, found.content_digest) == (image.digest, image.manifests["linux/amd64"][0])
    assert found.platforms == ("linux/amd64", "linux/arm64")
    expected = [("sha256:" + hashlib.sha256(data).hexdigest(), len(data)) for data in image.layers["linux/amd64"]]
    assert [(each.digest, each.size) for each in found.layers] == expected


async def test_no_build_for_this_platform(registry: ImageRegistry, client: RegistryClient) -> None:
    push_image(registry.url, "some", "1", two_platforms())
    with pytest.raises(NoBuild, match="it is made for linux/amd64, linux/arm64"):
        await client.resolve(f"{registry.host}/some:1", "darwin/arm64")


async def test_an_image_without_an_index(registry: ImageRegistry, client: RegistryClient) -> None:
    image = make_image({"linux/arm64": [layer({"run.sh": run_file()})]}, index=False)
    push_image(registry.url, "single", "1", image)
    reference = f"{registry.host}/single:1"
    found = await client.look_up(reference)
    assert [(each.platform, each.digest) for each in found.images] == [("linux/arm64", image.digest)]
    assert (await client.resolve(reference, "linux/arm64")).content_digest == image.digest
    with pytest.raises(NoBuild):
        await client.resolve(reference, "linux/amd64")


async def test_by_digest_whatever_the_tag_says(registry: ImageRegistry, client: RegistryClient) -> None:
    old, new = two_platforms(note="old"), two_platforms(note="new")
    for image in (old, new):
        push_image(registry.url, "moved", "latest", image)
    assert (await client.look_up(f"{registry.host}/moved:latest")).digest == new.digest
    assert (await client.look_up(f"{registry.host}/moved@{old.digest}")).digest == old.digest


async def test_what_is_not_there(registry: ImageRegistry, client: RegistryClient) -> None:
    push_image(registry.url, "there", "1", two_platforms())
    for reference in ("there:2", "not-there:1", "there@sha256:" + "0" * 64):
        with pytest.raises(NotFound):
            await client.look_up(f"{registry.host}/{reference}")


async def test_a_registry_that_is_down(client: RegistryClient) -> None:
    with pytest.raises(Unreachable, match="cannot be reached"):
        await client.look_up(f"127.0.0.1:{free_port()}/x:1")


async def test_a_line_that_breaks_while_it_is_asked(
    registry: ImageRegistry, line: Line, client: RegistryClient
) -> None:
    image = two_platforms()
    push_image(registry.url, "broken", "1", image)
    line.cut_after = [100]
    assert (await client.look_up(f"{line.host}/broken:1")).digest == image.digest
    await line.down()  # so that no connection is used again
    await line.up()
    line.cut_after = [100] * 10
    with pytest.raises(Unreachable, match="the connection broke"):
        await client.look_up(f"{line.host}/broken:1")


async def test_a_document_that_is_not_what_was_asked_for(client: RegistryClient) -> None:
    image = two_platforms()
    async with BlobServer() as server:
        host = f"127.0.0.1:{server.port}"
        server.put(f"/v2/x/manifests/{image.digest}", image.document + b" ")
        with pytest.raises(WrongDigest):
            await client.look_up(f"{host}/x@{image.digest}")
        assert len([asked for asked in server.asked if asked.path.endswith(image.digest)]) == 2
        server.put("/v2/x/manifests/big", b" " * 5_000_000)
        with pytest.raises(Exception, match="larger than"):
            await client.look_up(f"{host}/x:big")
        server.put("/v2/x/manifests/page", b"<html>")
        with pytest.raises(BadArchive, match="cannot be read"):
            await client.look_up(f"{host}/x:page")


async def test_a_login(tmp_path: Path, session: aiohttp.ClientSession) -> None:
    image = two_platforms()
    with running_registry(tmp_path, auth=basic_auth(tmp_path)) as registry:
        push_image(registry.url, "mine", "1", image, login_header())
        reference = f"{registry.host}/mine:1"
        with pytest.raises(Denied):
            await RegistryClient(session, settings=QUICK).look_up(reference)
        wrong = FixedLogins({registry.host: Login("ann", "guess")})
        with pytest.raises(Denied):
            await RegistryClient(session, credentials=wrong, settings=QUICK).look_up(reference)
        right = FixedLogins({registry.host: Login("ann", "secret")})
        found = await RegistryClient(session, credentials=right, settings=QUICK).look_up(reference)
        assert found.digest == image.digest


async def test_a_token_for_anybody(tmp_path: Path, session: aiohttp.ClientSession) -> None:
    image = two_platforms()
    async with TokenIssuer(tmp_path) as issuer:
        with running_registry(tmp_path, auth=issuer.auth) as registry:
            push_image(registry.url, "mine", "1", image, issuer.push_header("mine"))
            client = RegistryClient(session, settings=QUICK)
            for _ in range(3):
                assert (await client.look_up(f"{registry.host}/mine:1")).digest == image.digest
            assert issuer.given <= 3  # the first call's, for the index and its two images; then it is kept


async def test_a_token_for_a_login(tmp_path: Path, session: aiohttp.ClientSession) -> None:
    image = two_platforms()
    async with TokenIssuer(tmp_path, anonymous=False) as issuer:
        with running_registry(tmp_path, auth=issuer.auth) as registry:
            push_image(registry.url, "mine", "1", image, issuer.push_header("mine"))
            reference = f"{registry.host}/mine:1"
            with pytest.raises(Denied, match="no token was issued"):
                await RegistryClient(session, settings=QUICK).look_up(reference)
            logins = FixedLogins({registry.host: Login("ann", "secret")})
            client = RegistryClient(session, credentials=logins, settings=QUICK)
            assert (await client.look_up(reference)).digest == image.digest


async def test_a_token_that_expired_is_renewed(tmp_path: Path, session: aiohttp.ClientSession) -> None:
    image = two_platforms()
    async with TokenIssuer(tmp_path, lasts_s=5) as issuer:  # shorter than the margin: never shown twice
        with running_registry(tmp_path, auth=issuer.auth) as registry:
            push_image(registry.url, "mine", "1", image, issuer.push_header("mine"))
            client = RegistryClient(session, settings=QUICK)
            await client.resolve(f"{registry.host}/mine:1", "linux/amd64")
            first = issuer.given
            await client.resolve(f"{registry.host}/mine:1", "linux/amd64")
            assert issuer.given > first


async def test_no_password_goes_to_a_plain_place_an_encrypted_registry_names(session: aiohttp.ClientSession) -> None:
    logins = FixedLogins({"encrypted.example": Login("ann", "secret")})
    access = RegistryAuth(session, logins, SystemClock())
    async with BlobServer() as server:
        server.statuses = [(401, {"WWW-Authenticate": f'Bearer realm="{server.url("/token")}"'})]
        async with session.get(server.url("/v2/")) as response:
            with pytest.raises(Denied, match="over plain http, which is refused"):
                await access.answer("encrypted.example", "x", response, plain=False)
        assert [asked.path for asked in server.asked] == ["/v2/"]


@pytest.mark.parametrize(
    ("status", "body", "error"),
    [(200, b"{}", Failed), (200, b"<html>", Failed), (500, b"", TransferBroken), (404, b"", Denied)],
)
async def test_a_place_that_gives_no_token(
    session: aiohttp.ClientSession, status: int, body: bytes, error: type[Exception]
) -> None:
    access = RegistryAuth(session, FixedLogins(), SystemClock())
    async with BlobServer() as server:
        server.put("/token", body)
        server.statuses = [(401, {"WWW-Authenticate": f'Bearer realm="{server.url("/token")}"'})]
        async with session.get(server.url("/v2/")) as response:
            if status != 200:
                server.statuses = [(status, {})]
            with pytest.raises(error):
                await access.answer("x", "x", response, plain=True)


async def test_a_mirror_is_asked_first_and_the_host_when_it_fails(
    registry: ImageRegistry, session: aiohttp.ClientSession, line: Line
) -> None:
    image = two_platforms()
    push_image(registry.url, "mirrored", "1", image)
    settings = RegistrySettings(tries=1, mirrors={line.host: (registry.host,)})
    client = RegistryClient(session, settings=settings)
    assert (await client.look_up(f"{line.host}/mirrored:1")).digest == image.digest
    assert line.connections == 0
    for broken in (f"127.0.0.1:{free_port()}", "127.0.0.1:1"):
        settings = RegistrySettings(tries=1, mirrors={line.host: (broken,)})
        client = RegistryClient(session, settings=settings)
        assert (await client.look_up(f"{line.host}/mirrored:1")).digest == image.digest
    async with BlobServer() as empty:  # it answers, but has not got it
        settings = RegistrySettings(tries=1, mirrors={line.host: (f"127.0.0.1:{empty.port}",)})
        client = RegistryClient(session, settings=settings)
        assert (await client.look_up(f"{line.host}/mirrored:1")).digest == image.digest
        assert empty.asked
