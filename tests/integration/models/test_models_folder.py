"""The watched folder: files are models as long as they are there, on whichever controller."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from corral.contract.catalogue import EditModel, InstallModel
from corral.controller.models.folder import ModelsFolder
from corral.controller.models.service import Models
from corral.kit.clock import SystemClock
from corral.kit.errors import Conflict, Unavailable
from corral.store import Store
from corral.store.tables import models
from tests.integration.models.test_model_service import Told
from tests.support.model_catalogue import models_of


class Yard:
    """A folder and the part that watches it; `await run_once()` until a change counts."""

    def __init__(self, store: Store, path: Path) -> None:
        self.path = path
        self.told = Told()
        self.store = store
        self.service: Models = models_of(store, self.told)
        self.folder = ModelsFolder(path, self.service, store, self.told, SystemClock(), interval_s=0.01)

    def write(self, name: str, text: str) -> None:
        self.path.mkdir(exist_ok=True)
        (self.path / name).write_text(text)

    async def run_once(self, times: int = 2) -> dict[str, str]:
        for _ in range(times):
            await self.folder.run_once()
        async with self.store.read() as tx:
            return {row.id: row.origin for row in await models.list_(tx)}


@pytest.fixture
def yard(store: Store, tmp_path: Path) -> Yard:
    return Yard(store, tmp_path / "models")


async def test_a_file_is_a_model_from_the_second_look_on(yard: Yard) -> None:
    yard.write("a.yaml", "name: a\nbackend: vllm\n")
    yard.write("more.yml", "- {name: b, backend: vllm}\n- {name: c, alias: a}\n")
    for ignored in (".hidden.yaml", "notes.txt"):
        yard.write(ignored, "name: nobody\nbackend: vllm\n")
    assert await yard.run_once(1) == {}
    assert await yard.run_once(1) == {"a": "file", "b": "file", "c": "file"}
    assert sorted(yard.told.kinds) == [("models", "a"), ("models", "b"), ("models", "c")]
    shown = await yard.service.view("b")
    assert shown.source.endswith("/more.yml")
    await yard.run_once(3)
    assert (await yard.service.view("a")).row_version == 1, "nothing was written again"


async def test_a_file_that_changes_or_goes_takes_its_models_with_it(yard: Yard) -> None:
    yard.write("a.yaml", "- {name: a, backend: vllm}\n- {name: b, backend: vllm}\n")
    await yard.run_once()
    before = (await yard.service.view("a")).config_revision
    yard.write("a.yaml", "- {name: a, backend: vllm, context_size: 7}\n")
    assert await yard.run_once() == {"a": "file"}
    assert (await yard.service.view("a")).config_revision != before
    (yard.path / "a.yaml").unlink()
    assert await yard.run_once(1) == {"a": "file"}
    assert await yard.run_once(1) == {}


async def test_what_could_not_be_written_is_not_forgotten(yard: Yard, monkeypatch: pytest.MonkeyPatch) -> None:
    yard.write("a.yaml", "name: a\nbackend: vllm\n")
    await yard.run_once()
    yard.write("b.yaml", "name: b\nbackend: vllm\n")
    await yard.run_once(1)

    def away() -> object:
        raise Unavailable("the database is away")

    with monkeypatch.context() as patch:
        patch.setattr(yard.store, "write", away)
        with pytest.raises(Unavailable):
            await yard.run_once(1)
    assert await yard.run_once(1) == {"a": "file", "b": "file"}


async def test_a_file_that_comes_and_goes_holds_up_no_other(yard: Yard) -> None:
    yard.write("a.yaml", "name: a\nbackend: vllm\n")
    await yard.run_once()
    yard.write("b.yaml", "name: b\nbackend: vllm\n")
    await yard.run_once(1)
    yard.write("new.yaml", "half of")
    await yard.run_once(1)
    (yard.path / "new.yaml").unlink()
    assert await yard.run_once(1) == {"a": "file", "b": "file"}


async def test_a_file_rewritten_again_and_again_holds_up_nobody_else(yard: Yard) -> None:
    for name in ("a", "b", "log"):
        yard.write(f"{name}.yaml", f"name: {name}\nbackend: vllm\n")
    await yard.run_once()
    seen = []
    (yard.path / "b.yaml").unlink()
    for time in range(10):
        yard.write("log.yaml", "name: log\nbackend: vllm\n#" + "x" * time)
        yard.write("a.yaml", "name: a\nbackend: other\n")
        os.utime(yard.path / "a.yaml", (1, 1))
        seen.append(sorted(await yard.run_once(1)))
    assert (await yard.service.view("a")).backend == "other"
    assert seen[3] == ["a", "b", "log"], "what moves may be what went, under another name"
    assert seen[-1] == ["a", "log"]
    restarted = Yard(yard.store, yard.path)
    for time in range(10):
        yard.write("log.yaml", "name: log\nbackend: vllm\n#" + "y" * time)
        assert "log" in await restarted.run_once(1), "a file that could not be read yet has not lost its models"


async def test_a_file_that_names_what_no_disk_has_keeps_nobody_from_theirs(yard: Yard) -> None:
    yard.write("a.yaml", "name: a\nbackend: vllm\nparameters: {model: " + "z" * 5000 + "}\n")
    yard.write("b.yaml", "name: b\nbackend: vllm\n")
    assert await yard.run_once() == {"b": "file"}
    assert list(yard.folder.problems) == ["a.yaml"]


async def test_half_a_file_changes_nothing(yard: Yard) -> None:
    yard.write("a.yaml", "name: a\nbackend: vllm\n")
    await yard.run_once()
    yard.write("a.yaml", "name: a\nbackend: [vl")
    assert await yard.run_once() == {"a": "file"}
    assert list(yard.folder.problems) == ["a.yaml"]
    assert "not YAML" in yard.folder.problems["a.yaml"][0]
    yard.write("a.yaml", "- {name: a, backend: vllm}\n- {name: z, context_size: much}\n")
    assert await yard.run_once() == {"a": "file"}
    assert "context_size" in yard.folder.problems["a.yaml"][0]


async def test_an_entry_that_cannot_be_used_ends_no_model(yard: Yard) -> None:
    yard.write("a.yaml", "- {name: a, backend: vllm, parallel: 2}\n- {name: b, backend: vllm}\n")
    await yard.run_once()
    before = (await yard.service.view("a")).config_revision
    yard.write("a.yaml", "- {name: a, backend: vllm, parallel: two}\n")
    assert await yard.run_once() == {"a": "file"}, "what nobody speaks of any more has gone"
    assert (await yard.service.view("a")).config_revision == before
    assert "parallel" in yard.folder.problems["a.yaml"][0]
    yard.write("a.yaml", "- {backend: vllm}\n")
    assert await yard.run_once() == {"a": "file"}, "whom it means is not known"
    yard.write("a.yaml", "[]\n")
    assert await yard.run_once() == {}


async def test_a_file_emptied_by_mishap_ends_no_model(yard: Yard) -> None:
    yard.write("a.yaml", "name: a\nbackend: vllm\n")
    await yard.run_once()
    yard.write("a.yaml", "\n")
    assert await yard.run_once() == {"a": "file"}
    assert "is empty" in yard.folder.problems["a.yaml"][0]
    yard.write("a.yaml", "# a is not needed any more\n")
    assert await yard.run_once() == {}, "that somebody wrote"


@pytest.mark.parametrize("text", ["", "name: a\n\tbackend: vllm\n", "name: a\nbackend: vllm\nparallel: two\n"])
async def test_a_restart_beside_a_broken_file_ends_no_model(yard: Yard, text: str) -> None:
    yard.write("a.yaml", "name: a\nbackend: vllm\n")
    await yard.run_once()
    yard.write("a.yaml", text)
    after = Yard(yard.store, yard.path)
    assert await after.run_once(3) == {"a": "file"}
    assert after.folder.problems.keys() == {"a.yaml"}
    (yard.path / "a.yaml").unlink()
    assert await after.run_once() == {}


async def test_a_file_being_written_is_waited_for(yard: Yard) -> None:
    yard.write("a.yaml", "name: a\nbackend: vllm\n")
    await yard.run_once()
    for size in range(3):
        yard.write("a.yaml", "# " + "x" * size)
        assert await yard.run_once(1) == {"a": "file"}
    yard.write("a.yaml", "name: a\nbackend: other\n")
    await yard.run_once(1)
    assert (await yard.service.view("a")).backend == "vllm"
    await yard.run_once(1)
    assert (await yard.service.view("a")).backend == "other"


async def test_what_a_file_says_holds_against_everybody(yard: Yard) -> None:
    await yard.service.install(InstallModel(definition={"name": "a", "backend": "mine"}))
    yard.write("a.yaml", "name: a\nbackend: vllm\n")
    assert await yard.run_once() == {"a": "file"}
    for change in (
        yard.service.edit("a", EditModel(changes={"f16": True})),
        yard.service.delete("a"),
        yard.service.install(InstallModel(definition={"name": "a", "backend": "x"}, replace=True)),
    ):
        with pytest.raises(Conflict, match=r"defined by the file a\.yaml"):
            await change
    deleted = await yard.service.delete("a", force=True)
    assert deleted.notes == (
        "as long as the file a.yaml is in a watched models folder, a comes back: remove that file",
    )
    assert await yard.run_once(1) == {"a": "file"}, "it is still in the folder"


async def test_a_folder_that_is_not_there_has_not_lost_its_models(yard: Yard, tmp_path: Path) -> None:
    yard.write("a.yaml", "name: a\nbackend: vllm\n")
    await yard.run_once()
    yard.path.rename(tmp_path / "elsewhere")
    assert await yard.run_once(3) == {"a": "file"}
    yard.path.mkdir()  # the mount point without its disk
    assert await yard.run_once(3) == {"a": "file"}
    for each in yard.path.iterdir():
        each.unlink()
    yard.path.rmdir()
    (tmp_path / "elsewhere").rename(yard.path)
    assert await yard.run_once(3) == {"a": "file"}


async def test_each_controller_minds_its_own_folder(yard: Yard, other: Store, tmp_path: Path) -> None:
    second = Yard(other, tmp_path / "other models")
    yard.write("a.yaml", "name: a\nbackend: vllm\n")
    second.write("b.yaml", "name: b\nbackend: vllm\n")
    await yard.run_once()
    assert await second.run_once() == {"a": "file", "b": "file"}
    assert await yard.run_once(3) == {"a": "file", "b": "file"}
    again = Yard(other, yard.path)  # the same folder after a restart
    (yard.path / "a.yaml").unlink()
    assert await again.run_once(3) == {"b": "file"}


async def test_of_two_files_with_one_name_the_first_counts(yard: Yard) -> None:
    yard.write("2.yaml", "name: a\nbackend: two\n")
    yard.write("1.yaml", "name: a\nbackend: one\n")
    await yard.run_once()
    assert (await yard.service.view("a")).backend == "one"
    (yard.path / "1.yaml").unlink()
    await yard.run_once()
    assert (await yard.service.view("a")).backend == "two"


async def test_weights_beside_the_file_are_files_of_the_model(yard: Yard) -> None:
    yard.write("w.gguf", "weights")
    yard.write("p.gguf", "eyes")
    yard.write("a.yaml", "name: a\nbackend: llama-cpp\nparameters: {model: w.gguf}\nmmproj: p.gguf\n")
    yard.write("b.yaml", "name: b\nbackend: llama-cpp\nparameters: {model: elsewhere.gguf}\n")
    await yard.run_once()
    found = await yard.service.definition("a")
    assert found is not None
    assert [(file.path, file.uri, file.size_bytes) for file in found.files] == [
        ("w.gguf", f"file://{yard.path}/w.gguf", 7),
        ("p.gguf", f"file://{yard.path}/p.gguf", 4),
    ]
    other = await yard.service.definition("b")
    assert other is not None
    assert other.files == ()


async def test_a_folder_nobody_may_write_to_is_watched_too(yard: Yard) -> None:
    yard.write("a.yaml", "name: a\nbackend: vllm\n")
    mark = yard.path / ".corral-folder"
    mark.mkdir()  # as good as not being allowed to: also for those who are allowed everything
    assert await yard.run_once() == {"a": "file"}
    os.utime(yard.path / "a.yaml", (1, 1))
    assert await yard.run_once() == {"a": "file"}
