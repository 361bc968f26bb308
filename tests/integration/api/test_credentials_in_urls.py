"""Secrets in the URL of a model, a backend or a gallery: nobody is shown them, and nothing loses them."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from corral.controller.backends.gallery_status import GalleryStatus
from corral.gallery.galleries import Gallery
from corral.gallery.index_cache import GalleryState
from corral.store.tables import models as model_rows
from corral.store.tables.models import StoredModel
from tests.support.backend_api import Api

SECRET = "https://me:s3cret@files.example/m.gguf?token=s3cret&v=2"
SHOWN = "https://***@files.example/m.gguf?token=***&v=2"
MINE: dict[str, Any] = {
    "name": "mine",
    "backend": "vllm",
    "parameters": {"model": "m.gguf"},
    "download_files": [{"filename": "m.gguf", "uri": SECRET}],
}


class ScriptedLibrary:
    def states(self) -> list[GalleryState]:
        gallery = Gallery(
            "farm", "https://me:s3cret@galleries.example/i.yaml?sig=s3cret", ("https://t0ken@mirror.example",)
        )
        return [
            GalleryState(gallery, error="https://me:s3cret@galleries.example/i.yaml?sig=s3cret took longer than 120 s")
        ]

    async def check(self) -> list[GalleryState]:
        return self.states()


async def stored(api: Api, name: str = "mine") -> StoredModel:
    async with api.fleet.first.store.read() as tx:
        found = await model_rows.find(tx, name)
    assert found is not None
    return found


async def test_nobody_is_shown_user_and_password_of_a_model(api: Api) -> None:
    made = await api.post("/api/models", {"definition": MINE})
    assert made.status == 201
    for key in (api.viewer, api.admin):
        for path in ("/api/models/mine", "/api/export", "/page/definition?model=mine", "/api/models"):
            answer = await api.call("GET", path, key=key)
            assert answer.status == 200, path
            assert b"s3cret" not in answer.raw, path
    shown = (await api.get("/api/models/mine")).json
    assert shown["definition"]["download_files"][0]["uri"] == SHOWN
    assert (await stored(api)).definition["download_files"][0]["uri"] == SECRET


async def test_an_edit_and_an_export_that_come_back_lose_nothing(api: Api) -> None:
    await api.post("/api/models", {"definition": MINE})
    shown = (await api.get("/api/models/mine")).json["definition"]
    edited = await api.call("PUT", "/api/models/mine", {"definition": shown | {"context_size": 4096}})
    assert edited.status == 200, edited.json
    now = await stored(api)
    assert now.definition["download_files"][0]["uri"] == SECRET
    assert now.definition["context_size"] == 4096
    exported = (await api.get("/api/export")).json
    told = (await api.post("/api/apply", {"text": _yaml(exported), "dry_run": True})).json
    assert [change["action"] for change in told["changes"]] == ["nothing"]
    elsewhere = shown | {"name": "copy"}
    refused = await api.post("/api/models", {"definition": elsewhere})
    assert refused.status == 400
    assert "write them in place of the stars" in refused.json["error"]["message"]


async def test_galleries_and_their_errors_are_shown_without_user_and_password(api: Api) -> None:
    await api.serve(api.fleet.first, gallery_status=GalleryStatus({"models": ScriptedLibrary()}))
    answer = await api.call("GET", "/api/galleries", key=api.viewer, on=1)
    assert b"s3cret" not in answer.raw
    assert b"t0ken" not in answer.raw
    assert answer.json[0]["url"] == "https://***@galleries.example/i.yaml?sig=***"
    assert "https://***@galleries.example/i.yaml?sig=*** took longer" in answer.json[0]["notice"]


async def test_an_operation_and_a_refusal_do_not_repeat_them(api: Api) -> None:
    body = {"kind": "install", "backend": "tool", "uri": "https://me:s3cret@files.example/tool.tar.gz"}
    accepted = await api.post("/api/operations", body)
    assert accepted.status == 202, accepted.json
    for path in ("/api/operations", f"/api/operations/{accepted.json['jobID']}", "/api/export"):
        assert b"s3cret" not in (await api.call("GET", path, key=api.viewer)).raw, path
    refused = await api.post("/api/models", {"definition": MINE | {"name": "https://me:s3cret@files.example/x"}})
    assert refused.status == 400
    assert b"s3cret" not in refused.raw
    hidden = await api.post("/api/operations", body | {"uri": "https://***@files.example/tool.tar.gz"})
    assert hidden.status == 400
    told = await api.post("/api/apply", {"text": _yaml((await api.get("/api/export")).json), "dry_run": True})
    assert [change["action"] for change in told.json["changes"]] == ["nothing"]


def _yaml(exported: dict[str, Any]) -> str:
    return json.dumps(exported)


async def test_a_stored_model_whose_name_is_refused_now_can_still_be_deleted(api: Api) -> None:
    await api.post("/api/models", {"definition": MINE})
    row = await stored(api)
    for name in ("-rf", "a//b", "a%2fb"):
        refused = await api.post("/api/models", {"definition": MINE | {"name": name}})
        assert refused.status == 400
        assert f"{name!r} cannot be a model's name" in refused.json["error"]["message"]
        async with api.fleet.first.store.write() as tx:
            await model_rows.put(tx, msgspec.structs.replace(row, id=name, definition=MINE | {"name": name}))
    assert {each["id"] for each in (await api.get("/api/models")).json} == {"mine", "-rf", "a//b", "a%2fb"}
    for path in ("-rf", "a%2F%2Fb", "a%252fb"):
        gone = await api.call("DELETE", f"/api/models/{path}")
        assert gone.status == 200, (path, gone.raw)
    assert [each["id"] for each in (await api.get("/api/models")).json] == ["mine"]
