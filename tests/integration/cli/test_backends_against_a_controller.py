"""`corral backends …` against a controller's real doors, with scripted workers: the two sides agree on every word."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from corral.cli.main import main
from tests.support.backend_api import Api, open_api
from tests.support.waiting import until

LOGGED = re.compile(r"\d{4}-\d\d-\d\d \S+ \[\w+ *\] ")


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[Api]:
    async with open_api(tmp_path) as opened:
        yield opened


class Command:
    """`await corral("ops", "list")` runs it in a thread of this process, `begin` in a process of its own."""

    def __init__(self, api: Api, capsys: pytest.CaptureFixture[str]) -> None:
        self._api = api
        self._capsys = capsys
        self._begun: list[Process] = []

    async def __call__(self, *words: str) -> tuple[int, str, str]:
        where = ("--url", self._api.urls[0], "--key", self._api.admin)
        async with asyncio.timeout(40):
            code = await asyncio.to_thread(main, [*words, *where])
        printed = self._capsys.readouterr()
        # The controller in this process logs where the command prints.
        own = [line for line in printed.out.splitlines(keepends=True) if not LOGGED.match(line)]
        return code, "".join(own), printed.err

    async def begin(self, *words: str) -> Process:
        env = {**os.environ, "CORRAL_URL": self._api.urls[0], "CORRAL_KEY": self._api.admin}
        self._begun.append(
            await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "corral.cli.main", *words), env=env, stdout=PIPE, stderr=PIPE
            )
        )
        return self._begun[-1]

    async def close(self) -> None:
        for each in self._begun:
            if each.returncode is None:
                each.kill()
                await each.communicate()


@pytest.fixture
async def corral(api: Api, capsys: pytest.CaptureFixture[str]) -> AsyncIterator[Command]:
    command = Command(api, capsys)
    yield command
    await command.close()


async def ended(process: Process) -> tuple[int, str, str]:
    async with asyncio.timeout(40):
        out, err = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


async def test_from_install_to_delete(api: Api, corral: Command) -> None:
    for name in ("attic", "shed"):
        await api.fleet.corral(name)
    code, out, err = await corral("backends", "install", "vllm")
    assert (code, err) == (0, "")
    assert out.splitlines()[-1] == "vllm: installed on attic, shed"
    code, out, _ = await corral("backends", "list")
    assert out.splitlines()[1].split() == ["vllm", "1.0", "2", "of", "2:", "attic,", "shed"]

    api.fleet.catalogue.publish("vllm", "sha256:two")
    code, out, err = await corral("backends", "upgrade", "vllm", "--dry-run")
    assert re.search(r"attic +upgrade +cpu-vllm +1\.0 → 2\.0", out)
    assert "then one node of each hardware class switches" in err
    code, out, _ = await corral("backends", "upgrade", "vllm")
    assert (code, out.splitlines()[-1]) == (0, "vllm: upgraded on attic, shed")
    code, out, _ = await corral("backends", "upgrade", "vllm")
    assert (code, out) == (0, "vllm: nothing newer on any node (2.0 is installed)\n")
    code, out, err = await corral("backends", "upgrade", "vllm", "--dry-run")
    assert "vllm: nothing newer on any node (2.0 is installed)" in err
    code, out, _ = await corral("backends", "rollback", "vllm")
    assert (code, out.splitlines()[-1]) == (0, "vllm: rolled back on attic, shed")
    code, out, _ = await corral("backends", "delete", "vllm", "--all-nodes", "--yes")
    assert (code, out.splitlines()[-1]) == (0, "vllm: deleted on attic, shed")
    code, out, err = await corral("backends", "delete", "vllm", "--all-nodes", "--yes")
    assert (code, out) == (1, "")
    assert "not installed on any node" in err
    code, out, _ = await corral("ops", "history")
    assert [line.split()[1] for line in out.splitlines()[1:]] == ["delete", "rollback", "upgrade", "upgrade", "install"]


async def test_the_id_that_tables_show_is_in_their_json(api: Api, corral: Command) -> None:
    await api.fleet.corral("attic")
    code, out, _ = await corral("backends", "install", "vllm", "--json")
    job = json.loads(out)[0]["operation_id"]
    for words in (("ops", "history"), ("ops", "list", "--all")):
        _, table, _ = await corral(*words)
        assert table.splitlines()[1].split()[0] == job[:8]
        _, out, _ = await corral(*words, "--json")
        assert [each["operation_id"] for each in json.loads(out)] == [job]
    code, out, _ = await corral("ops", "show", job, "--json")
    assert (code, json.loads(out)["operation_id"]) == (0, job)


async def test_a_node_that_is_away_is_waited_for_by_nobody(api: Api, corral: Command) -> None:
    await api.fleet.corral("attic")
    await api.fleet.corral("shed", joins=False, status="offline")
    code, out, err = await corral("backends", "install", "vllm")
    assert code == 3
    assert "vllm: installed on attic" in out
    assert "vllm: waiting on shed: node offline, will retry when healthy" in out
    assert "corral ops watch" in err


async def test_a_failing_node_is_tried_again_and_cancelled(api: Api, corral: Command) -> None:
    attic = await api.fleet.corral("attic")
    attic.script.failures = [{"error": "wrong digest twice", "permanent": True}]
    code, out, err = await corral("backends", "install", "vllm")
    assert code == 1
    assert "vllm: failing on attic: wrong digest twice; no automatic retry" in out
    begun = re.search(r"corral ops retry (\w+)", err)
    assert begun is not None
    code, out, _ = await corral("ops", "retry", begun[1])
    assert (code, out.splitlines()[-1]) == (0, "vllm: installed on attic")


async def test_cancelling_ends_the_one_who_watches(api: Api, corral: Command) -> None:
    attic = await api.fleet.corral("attic")
    attic.script.hold = asyncio.Event()
    watching = await corral.begin("backends", "install", "vllm")
    await until(lambda: attic.orders("install"))
    (view,) = (await api.get("/api/operations")).json["operations"]
    code, out, _ = await corral("ops", "cancel", view["jobID"][:8])
    assert (code, out) == (0, f"{view['jobID'][:8]} (install vllm) cancelled\n")
    code, out, _ = await ended(watching)
    assert (code, out.splitlines()[-1]) == (1, "vllm: cancelled on attic")
    await until(lambda: attic.orders("cancel"))


async def test_ctrl_c_leaves_the_work_to_the_fleet(api: Api, corral: Command) -> None:
    attic = await api.fleet.corral("attic")
    attic.script.hold = asyncio.Event()
    watching = await corral.begin("backends", "install", "vllm")
    assert watching.stdout is not None
    async with asyncio.timeout(30):
        await watching.stdout.readline()  # whose install it is: from here on it watches
    watching.send_signal(signal.SIGINT)
    code, _, err = await ended(watching)
    assert code == 3
    attic.script.hold.set()
    again = re.search(r"corral ops watch (\w+)", err)
    assert again is not None
    code, out, _ = await corral("ops", "watch", again[1])
    assert (code, out.splitlines()[-1]) == (0, "vllm: installed on attic")


async def test_what_is_asked_twice_is_one_operation_and_both_watch_it(api: Api, corral: Command) -> None:
    attic = await api.fleet.corral("attic")
    attic.script.hold = asyncio.Event()
    first = await corral.begin("backends", "install", "vllm")
    await until(lambda: attic.orders("install"))
    second = await corral.begin("backends", "install", "vllm")
    assert second.stderr is not None
    async with asyncio.timeout(30):
        assert b"already under way" in await second.stderr.readline()
    attic.script.hold.set()
    assert {(await ended(each))[0] for each in (first, second)} == {0}
    assert len(attic.orders("install")) == 1


async def test_unknown_names_are_answered_with_near_ones(api: Api, corral: Command) -> None:
    await api.fleet.corral("attic")
    code, out, err = await corral("backends", "install", "vlm")
    assert (code, out, err) == (1, "", "corral: no backend is called 'vlm'; did you mean vllm?\n")
    code, _, err = await corral("backends", "install", "vllm", "--node", "atic")
    assert (code, "did you mean attic?" in err) == (1, True)
    code, _, err = await corral("backends", "install", "cuda-vllm")
    assert (code, "install vllm instead" in err) == (1, True)


async def test_what_is_damaged_is_found_and_how_to_mend_it_is_told(api: Api, corral: Command) -> None:
    attic, _ = [await api.fleet.corral(name) for name in ("attic", "shed")]
    await api.fleet.until(await api.fleet.install(), "done")
    code, out, err = await corral("backends", "verify", "vllm")
    assert (code, err) == (0, "")
    assert [line.split()[:3] for line in out.splitlines()[1:]] == [
        ["attic", "vllm", "intact"],
        ["shed", "vllm", "intact"],
    ]
    attic.damaged = ("run.sh",)
    code, out, err = await corral("backends", "verify", "vllm")
    assert code == 1
    assert out.splitlines()[1].split() == ["attic", "vllm", "damaged", "1", "run.sh"]
    assert "corral backends install vllm --force --node attic" in err
    code, _, err = await corral("backends", "verify", "vlm")
    assert (code, "did you mean vllm?" in err) == (1, True)
