"""`corral models …`, `corral apply` and `corral export` against a controller's real doors."""

from __future__ import annotations

import asyncio
import json
import re
import stat
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from corral.cli.main import main
from corral.cli.models import commands as models_command
from corral.controller.backends.plan import NoBuild
from tests.support.backend_api import Api, open_api
from tests.support.gguf_files import LLAMA, TOKENS, gguf

LOGGED = re.compile(r"\d{4}-\d\d-\d\d \S+ \[\w+ *\] ")


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[Api]:
    async with open_api(tmp_path) as opened:
        yield opened


class Command:
    def __init__(self, api: Api, capsys: pytest.CaptureFixture[str]) -> None:
        self._api = api
        self._capsys = capsys

    async def __call__(self, *words: str) -> tuple[int, str, str]:
        where = ("--url", self._api.urls[0], "--key", self._api.admin)
        async with asyncio.timeout(40):
            family = () if words[0] in ("apply", "export") else ("models",)
            code = await asyncio.to_thread(main, [*family, *words, *where])
        printed = self._capsys.readouterr()
        own = [line for line in printed.out.splitlines(keepends=True) if not LOGGED.match(line)]
        return code, "".join(own), printed.err


@pytest.fixture
def corral(api: Api, capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(api, capsys)


async def test_from_the_gallery_to_nothing(corral: Command) -> None:
    code, out, _ = await corral("available", "smollm2")
    assert code == 0
    assert out.splitlines()[1].split()[:6] == ["smollm2-135m", "llama-cpp", "94MiB", "no", "node", "corral"]
    code, out, _ = await corral("show", "smollm2-135m")
    assert "fits         on no node: there are no nodes" in out
    code, out, err = await corral("install", "smollm2-135m", "--as", "tiny", "--set", "context_size=2048")
    assert (code, out) == (0, "tiny installed\n")
    assert "The first request loads the model" in err
    code, out, err = await corral("install", "smollm2-135m", "--as", "tiny", "--set", "context_size=1024")
    assert (code, out, "installed with other settings: change it with `corral models edit tiny --set" in err) == (
        1,
        "",
        True,
    )
    code, out, err = await corral("install", "smollm2-135m", "--as", "tiny", "--set", "context_size=2048")
    assert (code, out, "other settings" in err) == (0, "tiny is as it was\n", False), "they are what it has"
    for given in (("--as", "other"), ("--set", "context_size=1"), ("--variant", "none")):
        code, out, err = await corral("install", "smollm2-135m", "--dry-run", *given)
        assert (code, out, "leave --as, --set and --variant out" in err) == (2, "", True), given
    code, out, _ = await corral("list")
    assert (code, out.splitlines()[1].split()) == (0, ["tiny", "llama-cpp", "0", "93.8", "MiB", "corral@smollm2-135m"])
    code, out, _ = await corral("show", "tiny")
    assert code == 0
    assert "context      2048" in out
    assert "parameters:\n  model: SmolLM2-135M-Instruct.Q4_1.gguf\n" in out
    code, out, _ = await corral("edit", "tiny", "--set", "parameters.temperature=0.2", "--unset", "parallel")
    assert (code, out) == (0, "tiny edited\n")
    code, out, _ = await corral("show", "tiny", "--json")
    shown = json.loads(out)
    assert shown["definition"]["parameters"] == {"model": "SmolLM2-135M-Instruct.Q4_1.gguf", "temperature": 0.2}
    assert "parallel" not in shown["definition"]
    assert shown["schedule"] is None
    code, out, err = await corral("delete", "tiny")
    assert (code, out) == (2, "")
    assert "--yes" in err
    code, out, _ = await corral("delete", "tiny", "--yes")
    assert (code, out) == (0, "tiny deleted\n")
    code, out, err = await corral("list")
    assert (code, out) == (0, "")
    assert "corral models install" in err


async def test_a_file_is_not_uploaded_for_a_name_that_is_taken(corral: Command, tmp_path: Path) -> None:
    (tmp_path / "taken.yaml").write_text("{name: taken, backend: mock}")
    assert (await corral("install", "--file", str(tmp_path / "taken.yaml")))[0] == 0
    weights = tmp_path / "small.Q4_1.gguf"
    weights.write_bytes(gguf({**LLAMA, **TOKENS}) + bytes(4096))
    code, _, err = await corral("install", str(weights), "--as", "taken")
    assert (code, "there is a model taken already" in err) == (1, True), err
    assert "Operation" not in err, "no upload has begun"


async def test_an_entry_of_a_gallery_is_shown_though_nobody_installed_it(corral: Command) -> None:
    code, out, _ = await corral("show", "corral@smollm2-135m")
    assert code == 0
    assert "installed    no: `corral models install corral@smollm2-135m`" in out
    assert "parameters:\n  model: SmolLM2-135M-Instruct.Q4_1.gguf\n" in out
    code, out, _ = await corral("show", "smollm2-135m", "--json")
    assert (code, json.loads(out)["installed"]) == (0, False)
    code, out, err = await corral("show", "smollm3")
    assert (code, out) == (1, "")
    assert "there is no model 'smollm3'" in err
    code, out, _ = await corral("list")
    assert (code, out) == (0, ""), "showing installs nothing"


async def test_definitions_in_files_go_through_and_come_back(corral: Command, tmp_path: Path) -> None:
    file = tmp_path / "models.yaml"
    file.write_text("- {name: a, backend: vllm}\n- {name: b, alias: a}\n- {name: c, alias: c}\n")
    code, out, err = await corral("install", "--file", str(file))
    assert (code, out) == (1, "a installed\nb installed\n")
    assert "cannot stand for itself" in err
    code, out, _ = await corral("list")
    assert [line.split() for line in out.splitlines()[1:]] == [
        ["a", "vllm", "0", "boss"],
        ["b", "boss", "alias", "of", "a"],
    ]
    code, out, _ = await corral("show", "a", "--yaml")
    file.write_text(out + "f16: true\n")
    code, out, _ = await corral("edit", "a", "--file", str(file))
    assert (code, out) == (0, "a edited\n")
    code, out, _ = await corral("edit", "a", "--file", str(file))
    assert (code, out) == (0, "a is as it was\n")
    code, out, err = await corral("delete", "a", "--yes")
    assert (code, "b stands for a" in err) == (1, True)
    code, out, err = await corral("show", "aa")
    assert (code, "there is no model 'aa'" in err) == (1, True)


def taken_away(path: Path) -> str:
    text = path.read_text()
    path.unlink()
    return text


async def test_in_an_editor(corral: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    editor = tmp_path / "editor"
    monkeypatch.setattr(models_command, "is_interactive", lambda: True)
    monkeypatch.delenv("VISUAL", raising=False)
    monkeypatch.setenv("EDITOR", str(editor))

    def types(command: str) -> None:
        editor.write_text(f"#!/bin/sh\n{command}\n")
        editor.chmod(editor.stat().st_mode | stat.S_IXUSR)

    await corral("install", "smollm2-135m")
    types("true")
    code, out, err = await corral("edit", "smollm2-135m")
    assert (code, out, err) == (0, "", "Nothing was changed.\n")
    types('sed -i "s/context_size: 4096/context_size: 1024/" "$1"')
    code, out, _ = await corral("edit", "smollm2-135m")
    assert (code, out) == (0, "smollm2-135m edited\n")
    types('echo "context_size: nonsense" > "$1"')
    code, out, err = await corral("edit", "smollm2-135m")
    assert code == 1
    kept = re.search(r"--file (\S+)`", err)
    assert kept is not None
    assert taken_away(Path(kept[1])) == "context_size: nonsense\n"


async def test_scaling_keeps_what_is_not_said(corral: Command) -> None:
    await corral("install", "smollm2-135m")
    code, out, _ = await corral("scale", "smollm2-135m", "--min", "1", "--max", "3", "--selector", "tier=fast")
    assert (code, out) == (0, "smollm2-135m: 1–3\n")
    code, out, _ = await corral("scale", "smollm2-135m", "--min", "2", "--policy", "round_robin", "--json")
    told = json.loads(out)
    assert (told["min_replicas"], told["max_replicas"], told["node_selector"]) == (2, 3, '{"tier":"fast"}')
    assert told["route_policy"] == "round_robin"
    code, out, _ = await corral("scale", "smollm2-135m", "--all")
    assert (code, out) == (0, "smollm2-135m: every node\n")
    code, out, _ = await corral("scale", "smollm2-135m", "--auto")
    assert (code, out) == (0, "smollm2-135m: as many replicas as requests need\n")
    code, out, err = await corral("scale", "smollm2-135m", "--min", "3", "--max", "2")
    assert (code, "more than max_replicas" in err) == (1, True)
    code, out, err = await corral("scale", "nobody", "--min", "3")
    assert (code, "there is no model 'nobody'" in err) == (1, True)
    assert (await corral("scale", "smollm2-135m"))[0] == 2


async def test_a_fleet_as_one_file(api: Api, corral: Command, tmp_path: Path) -> None:
    await api.fleet.corral("barn")
    file = tmp_path / "fleet.yaml"
    file.write_text("labels: {barn: {tier: fast}}\nmodels: [{name: a, backend: vllm}]\nbackends: [vllm]\n")
    code, out, err = await corral("apply", "-f", str(file), "--dry-run")
    assert (code, out) == (0, "~ label barn\n    + tier: fast\n+ backend vllm\n    on every node\n+ model a\n")
    assert "2 created, 1 changed. Dry run: nothing was changed." in err
    code, out, err = await corral("apply", "-f", str(file))
    assert (code, "corral ops list" in err) == (0, True)
    code, out, _ = await corral("export")
    assert out == "models:\n- name: a\n  backend: vllm\nbackends:\n- backend: vllm\nlabels:\n  barn:\n    tier: fast\n"
    file.write_text(out + "schedules: [{model_name: a, min_replicas: 1}]\n")
    code, out, err = await corral("apply", "-f", str(file), "--json")
    assert [(each["kind"], each["action"]) for each in json.loads(out)["changes"]] == [
        ("label", "nothing"),
        ("backend", "nothing"),
        ("model", "nothing"),
        ("schedule", "create"),
    ]
    file.write_text("models: [nobody]\n")
    code, out, err = await corral("apply", "-f", str(file))
    assert (code, "corral: model nobody: no gallery has a model 'nobody'" in err) == (1, True)
    assert "`corral models available` lists the names" in err


@pytest.mark.parametrize("flags", [("--dry-run",), ()])
async def test_a_backend_that_fits_no_node_is_told_by_apply(
    api: Api, corral: Command, tmp_path: Path, flags: tuple[str, ...]
) -> None:
    api.fleet.catalogue.builds["mlx-lm"] = {"*": NoBuild("needs a Mac")}
    await api.fleet.corral("barn")
    file = tmp_path / "fleet.yaml"
    file.write_text("backends: [mlx-lm]\n")
    code, out, _ = await corral("apply", "-f", str(file), *flags)
    why = "fits no node now (barn: needs a Mac); one that joins and fits gets it"
    assert (code, out) == (0, f"+ backend mlx-lm: {why}\n    on every node\n")
    file.write_text("backends: [vlm]\n")
    code, out, err = await corral("apply", "-f", str(file), *flags)
    assert (code, out) == (1, "? backend vlm\n")
    assert "corral: backend vlm: no backend is called 'vlm'; did you mean vllm?" in err


async def test_what_is_not_there_yet_is_told_before_and_after(corral: Command, tmp_path: Path) -> None:
    file = tmp_path / "fleet.yaml"
    file.write_text("backends: [{backend: vllm, node: ghost}]\nschedules: [{model_name: b, min_replicas: 1}]\n")
    told = "? backend vllm: there is no node ghost yet\n+ schedule b: there is no model b yet\n    + min_replicas: 1\n"
    assert (await corral("apply", "-f", str(file), "--dry-run"))[:2] == (0, told)
    assert (await corral("apply", "-f", str(file)))[:2] == (0, told)


async def test_a_model_whose_gallery_is_silent_is_not_pruned(corral: Command, tmp_path: Path) -> None:
    mine, file = tmp_path / "mine.yaml", tmp_path / "fleet.yaml"
    mine.write_text("- {name: kept, backend: vllm}\n- {name: other, backend: vllm}\n")
    assert (await corral("install", "--file", str(mine)))[0] == 0
    file.write_text("models: [away@kept]\n")
    code, out, err = await corral("apply", "-f", str(file), "--prune")
    assert (code, out) == (1, "? model kept\n- model other\n")
    assert "corral: model kept: " in err
    assert [model["id"] for model in json.loads((await corral("list", "--json"))[1])] == ["kept"]
