"""Files of models: found at their sources, fetched to the controller once, and remembered."""

from __future__ import annotations

import asyncio
import hashlib
import io
import os
import zipfile

import pytest
from aiohttp import web

from corral.blobs.errors import NoSpace, WrongDigest
from corral.contract.sources import Wheel
from corral.kit.errors import Denied, Invalid, NotFound
from tests.support.image_registry import ImageRegistry, layer, make_artifact, make_image, push_image, registry
from tests.support.model_file_site import DIGEST, WEIGHTS, Site, listed, site
from tests.support.waiting import until

__all__ = ["registry", "site"]  # fixtures


async def test_a_download_and_a_file_of_this_machine(site: Site) -> None:
    (site.folder / "open" / "tok.json").write_bytes(b"{}")
    local = (site.folder / "open" / "tok.json").as_uri()
    web_uri = site.server.put("/w.gguf", WEIGHTS, etag='"1"')
    definition = await site.install(parameters={"model": "w.gguf"}, **listed(("tok.json", local), ("w.gguf", web_uri)))
    files = site.files()
    assert await files.known(definition) is None
    got = await files.ensure(definition, site.told.append)
    which = got[0].path.split("/")[1]
    assert [(file.path, file.size_bytes) for file in got] == [
        (f"m/{which}/w.gguf", len(WEIGHTS)),
        (f"m/{which}/tok.json", 2),
    ]
    assert got[0].digest == DIGEST
    path = files.find(DIGEST)
    assert path is not None
    assert path.read_bytes() == WEIGHTS
    assert (site.told[-1].current_bytes, site.told[-1].total_bytes) == (len(WEIGHTS) + 2, len(WEIGHTS) + 2)
    assert files.status("m") is None
    assert await files.known(definition) == got
    asked = len(site.server.asked)
    assert await files.ensure(definition) == got
    assert len(site.server.asked) == asked


async def test_a_file_inside_a_wheel(site: Site) -> None:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("demo/__init__.py", "")
        archive.writestr("demo/w.gguf", WEIGHTS)
    content = packed.getvalue()
    url = site.server.put("/demo.whl", content)
    site.index.wheel = Wheel(
        "demo-1.2-py3-none-any.whl", url, hashlib.sha256(content).hexdigest(), len(content), "demo", "1.2"
    )
    definition = await site.install(**listed(("w.gguf", "pypi://demo/demo/w.gguf")))
    (file,) = await site.files().ensure(definition)
    assert (file.digest, file.size_bytes) == (DIGEST, len(WEIGHTS))
    assert await site.rows() == {"w.gguf": ("pypi://demo==1.2/demo/w.gguf", DIGEST)}
    assert os.listdir(site.folder / "blobs" / "sha256") == [DIGEST.removeprefix("sha256:")]
    # Another controller fetches the same version, whatever is the newest by now.
    assert await site.files("elsewhere").ensure(definition) == (file,)
    assert site.index.asked == ["demo", "demo==1.2"]
    absent = await site.install(**listed(("w.gguf", "pypi://demo/demo/other.gguf")))
    with pytest.raises(NotFound, match=r"demo/w\.gguf"):
        await site.files().ensure(absent)


async def test_the_hub_tells_what_is_there_and_sees_the_token_alone(site: Site) -> None:
    commit = "c" * 40
    cdn = site.server.put("/cdn/w.gguf", WEIGHTS)
    shown: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        shown.append(request.headers.get("Authorization", ""))
        if shown[-1] != "Bearer hf_secret":
            return web.Response(status=401)
        headers = {
            "Location": cdn,
            "X-Repo-Commit": commit,
            "X-Linked-ETag": f'"{DIGEST.removeprefix("sha256:")}"',
            "X-Linked-Size": str(len(WEIGHTS)),
        }
        return web.Response(status=302, headers=headers)

    app = web.Application()
    app.router.add_route("*", "/{tail:.*}", answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    site.hub = f"http://127.0.0.1:{runner.addresses[0][1]}"
    definition = await site.install(parameters={"model": "huggingface://ann/demo/w.gguf"})
    with pytest.raises(Denied, match="--huggingface-token"):
        await site.files().ensure(definition)
    site.hub_token = "hf_secret"
    (file,) = await site.files().ensure(definition)
    assert file.path.endswith("/w.gguf")
    assert file.digest == DIGEST
    assert await site.rows() == {"w.gguf": (f"{site.hub}/ann/demo/resolve/{commit}/w.gguf", DIGEST)}
    assert {asked.authorization for asked in site.server.asked} == {""}
    await runner.cleanup()


async def test_files_of_artifacts_and_images(site: Site, registry: ImageRegistry) -> None:
    artifact = make_artifact({"model/w.gguf": WEIGHTS, "README.md": b"read me"})
    push_image(registry.url, "demo/artifact", "1", artifact)
    reference = f"oci://{registry.host}/demo/artifact:1"
    definition = await site.install(**listed(("model/w.gguf", reference), ("docs/README.md", reference)))
    files = site.files()
    weights, readme = await files.ensure(definition)
    assert (weights.digest, readme.size_bytes) == (DIGEST, 7)
    assert (await site.rows())["docs/README.md"][0] == f"oci://{registry.host}/demo/artifact@{artifact.digest}"
    absent = await site.install(**listed(("other.gguf", reference)))
    with pytest.raises(NotFound, match=r"model/w\.gguf, README\.md"):
        await files.ensure(absent)
    image = make_image({"linux/amd64": [layer({"models/w.gguf": WEIGHTS}), layer({"etc/x": b"1"})]})
    push_image(registry.url, "demo/image", "1", image)
    definition = await site.install(**listed(("models/w.gguf", f"oci://{registry.host}/demo/image:1")))
    files = site.files("elsewhere")
    (found,) = await files.ensure(definition)
    assert found.digest == DIGEST
    assert os.listdir(site.folder / "elsewhere" / "sha256") == [DIGEST.removeprefix("sha256:")]


async def test_only_opened_folders_are_read(site: Site) -> None:
    (site.folder / "secret").write_bytes(b"s")
    (site.folder / "open" / "link").symlink_to(site.folder / "secret")
    for name in ("secret", "open/../secret", "open/link"):
        definition = await site.install(**listed(("x", f"file://{site.folder}/{name}")))
        with pytest.raises(Denied, match="--file-folders"):
            await site.files().ensure(definition)
    definition = await site.install(**listed(("x", f"file://{site.folder}/open/none")))
    with pytest.raises(NotFound):
        await site.files().ensure(definition)
    for uri in ("file://elsewhere/x", "gopher://x/y", "pypi://demo", "pypi://demo/../x"):
        definition = await site.install(**listed(("x", uri)))
        with pytest.raises(Invalid):
            await site.files().ensure(definition)


async def test_files_beside_the_definitions(site: Site) -> None:
    (site.folder / "models" / "mine").mkdir()
    for name in ("a.safetensors", "config.json", "a.safetensors.sha256", ".hidden"):
        (site.folder / "models" / "mine" / name).write_bytes(name.encode())
    definition = await site.install(parameters={"model": "mine"})
    got = await site.files().ensure(definition)
    assert [file.path.split("/", 2)[2] for file in got] == ["mine/a.safetensors", "mine/config.json"]
    engine = await site.install(parameters={"model": "org/fetched-by-the-engine"})
    assert await site.files().ensure(engine) == ()


async def test_what_was_declared_is_insisted_on_and_what_was_not_may_change(site: Site) -> None:
    uri = site.server.put("/w", WEIGHTS, etag='"1"')
    declared = await site.install(**listed(("w", uri), sha256="0" * 64))
    with pytest.raises(WrongDigest):
        await site.files().ensure(declared)
    files = site.files()
    with pytest.raises(WrongDigest):
        await files.ensure(declared)
    assert "not sha256:000" in (status.error if (status := files.status("m")) else "")
    free = await site.install(**listed(("w", uri)))
    (before,) = await site.files().ensure(free)
    site.server.put("/w", WEIGHTS + b"more", etag='"2"')
    (same,) = await site.files().ensure(free)
    assert same == before
    (after,) = await site.files("elsewhere").ensure(free)
    assert after.size_bytes == len(WEIGHTS) + 4
    assert after.path != before.path


async def test_files_a_model_has_no_more_are_forgotten(site: Site) -> None:
    first, second = (site.server.put(f"/{name}", name.encode(), etag='"1"') for name in "ab")
    await site.files().ensure(await site.install(**listed(("a", first), ("b", second))))
    assert list(await site.rows()) == ["a", "b"]
    await site.files().ensure(await site.install(**listed(("b", second))))
    assert list(await site.rows()) == ["b"]


async def test_room_is_asked_for_before_the_first_byte(site: Site) -> None:
    uris = [(f"w{number}", site.server.put(f"/{number}", WEIGHTS, etag='"1"')) for number in range(3)]
    definition = await site.install(**listed(*uris))
    site.free = 2 * len(WEIGHTS)
    with pytest.raises(NoSpace, match="files of m"):
        await site.files().ensure(definition)
    assert os.listdir(site.folder / "blobs" / "incoming") == []


async def test_a_fetch_that_is_cancelled_goes_on_later(site: Site) -> None:
    uri = site.server.put("/w", WEIGHTS, etag='"1"')
    definition = await site.install(**listed(("w", uri)))
    site.server.pause.clear()
    files = site.files()
    asking = [asyncio.create_task(files.ensure(definition, site.told.append)) for _ in range(2)]
    await until(lambda: len(site.server.asked) >= 2)
    site.server.cut_after = [700_000]
    site.server.pause.set()
    await until(lambda: any(progress.current_bytes >= 100_000 for progress in site.told))
    for task in asking:
        task.cancel()
    await asyncio.wait(asking)
    await site.files().ensure(definition)
    starts = [int(asked.range.removeprefix("bytes=").rstrip("-")) for asked in site.server.asked if asked.range]
    assert starts
    assert min(starts) >= 100_000
