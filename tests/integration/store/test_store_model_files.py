"""What the files of models turned out to be."""

from __future__ import annotations

import pytest

from corral.kit.errors import Conflict
from corral.store import Store
from corral.store.tables import model_files, models
from tests.integration.store.rows import NOON, a_file, a_model


async def test_files_are_kept_replaced_and_go_with_their_model(store: Store) -> None:
    async with store.write() as tx:
        await models.put(tx, a_model("a"))
        await models.put(tx, a_model("b"))
        await model_files.put(tx, a_file("a"))
        await model_files.put(tx, a_file("a", "mmproj.gguf", digest="sha256:" + "c" * 64))
        await model_files.put(tx, a_file("b"))
    async with store.write() as tx:
        await model_files.put(tx, a_file("a", digest="sha256:" + "d" * 64, size_bytes=7))
    async with store.read() as tx:
        of_a = await model_files.list_of(tx, "a")
        assert [(file.path, file.digest[-1], file.size_bytes) for file in of_a] == [
            ("mmproj.gguf", "c", 98_000_000_000),
            ("weights.gguf", "d", 7),
        ]
        assert of_a[0].fetched_at > NOON
        assert len(await model_files.list_(tx)) == 3
        assert len(await model_files.list_(tx, ["b"])) == 1
        assert sorted(digest[-1] for digest in await model_files.list_digests(tx)) == ["a", "c", "d"]
    async with store.write() as tx:
        await models.delete(tx, "a")
        assert await model_files.list_digests(tx) == ["sha256:" + "a" * 64]


async def test_there_are_no_files_of_no_model(store: Store) -> None:
    with pytest.raises(Conflict):
        async with store.write() as tx:
            await model_files.put(tx, a_file("nobody"))
