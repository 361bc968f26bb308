"""Fleets of one machine by name: which one commands go to, and that no fleet takes another's place."""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from corral.cli.common.data_folder import DataFolder, lock_file
from corral.client import LocalFleet, find_endpoint, local_file, write_local
from corral.client.contexts import (
    check_context_name,
    choose_context,
    claim_context,
    delete_context,
    forget_context,
    list_contexts,
    refuse_taken,
    use_context,
)
from corral.kit.errors import Conflict, Invalid, NotFound


class Machine:
    """Fleets that start, stop and are killed; `up` holds the lock that a running `corral up` holds."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.env = {"CORRAL_CONFIG_DIR": str(root / "config"), "HOME": str(root)}
        self._locks: dict[str, ExitStack] = {}
        self._started = 0

    def fleet(self, folder: str) -> LocalFleet:
        data = self.root / folder
        data.mkdir(parents=True, exist_ok=True)
        (data / "admin.key").write_text(f"ck_{data.name}\n")
        self._started += 1
        return LocalFleet(
            url=f"http://127.0.0.1:{8000 + self._started}",
            data=str(data),
            admin_key_file=str(data / "admin.key"),
            pid=os.getpid(),
            started_at=float(self._started),
        )

    def run(self, folder: str) -> LocalFleet:
        fleet = self.fleet(folder)
        self._locks[folder] = ExitStack()
        self._locks[folder].enter_context(lock_file(DataFolder(Path(fleet.data)).lock))
        return fleet

    def up(self, folder: str, name: str = "") -> str:
        return claim_context(self.env, self.run(folder), name).name

    def kill(self, folder: str) -> None:
        self._locks.pop(folder).close()

    def stop(self, folder: str) -> None:
        forget_context(self.env, data=str(self.root / folder))
        self.kill(folder)

    def close(self) -> None:
        for each in self._locks.values():
            each.close()

    def target(self, **how: str) -> str:
        return find_endpoint(env=self.env, **how).context


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    made = Machine(tmp_path)
    yield made
    made.close()


def test_a_second_fleet_does_not_take_the_commands_of_the_first(machine: Machine) -> None:
    assert machine.up("first") == "first"
    assert machine.up("second") == "second"
    assert machine.target() == "first"
    assert machine.target(context="second") == "second"
    machine.stop("second")
    assert machine.target() == "first"


def test_when_the_first_stops_the_second_stays_usable(machine: Machine) -> None:
    machine.up("first")
    machine.up("second")
    machine.stop("first")
    assert machine.target() == "second"
    machine.stop("second")
    with pytest.raises(Invalid, match="no fleet found"):
        machine.target()


def test_a_live_entry_is_never_overwritten(machine: Machine) -> None:
    machine.up("a/data")
    assert machine.up("b/data") == "data-2"
    assert machine.up("c/data", "data") == "data-3"  # its name was taken between the check and now
    with pytest.raises(Conflict, match=r"runs already, pid \d+: give this fleet another name with --context"):
        refuse_taken(machine.env, "data", str(machine.root / "c/data"))
    refuse_taken(machine.env, "data", str(machine.root / "a/data"))
    assert {each.name: Path(each.fleet.data).parent.name for each in list_contexts(machine.env)} == {
        "data": "a",
        "data-2": "b",
        "data-3": "c",
    }


def test_the_entry_of_a_killed_fleet_gives_way(machine: Machine) -> None:
    machine.up("a/data")
    use_context(machine.env, "data")
    machine.kill("a/data")
    machine.up("other")
    assert machine.up("b/data") == "data"
    assert machine.target() == "other"  # the fleet that was chosen is gone; one of the same name was not chosen
    assert machine.target(context="data") == "data"


def test_a_folder_has_one_entry_whatever_its_name(machine: Machine) -> None:
    machine.up("first", "one")
    machine.kill("first")
    machine.up("first", "uno")
    assert [each.name for each in list_contexts(machine.env)] == ["uno"]


def test_a_choice_holds_until_that_fleet_stops(machine: Machine) -> None:
    machine.up("first")
    machine.up("second")
    use_context(machine.env, "second")
    assert machine.target() == "second"
    machine.stop("second")
    assert machine.target() == "first"
    machine.up("second")
    assert machine.target() == "first"


def test_a_name_given_beats_the_choice_and_is_not_ambiguous(machine: Machine) -> None:
    machine.up("first")
    machine.up("second")
    assert find_endpoint(env=machine.env).others == (f"'second' (http://127.0.0.1:8002, {machine.root / 'second'})",)
    machine.env["CORRAL_CONTEXT"] = "second"
    assert machine.target() == "second"
    assert find_endpoint(env=machine.env).others == ()
    assert machine.target(context="first") == "first"
    assert machine.target(url="http://localhost:8001") == "first"
    with pytest.raises(NotFound, match="no context 'third': the contexts are first, second"):
        machine.target(context="third")
    with pytest.raises(Invalid, match="--url or --context, not both"):
        machine.target(context="first", url="http://localhost:8001")


def test_a_chosen_fleet_that_was_killed_is_named_before_another_takes_its_place(machine: Machine) -> None:
    machine.up("first")
    machine.up("second")
    use_context(machine.env, "second")
    machine.kill("second")
    choice = choose_context(machine.env)
    assert choice is not None
    assert choice.context.name == "first"
    assert [each.name for each in choice.others] == ["second"]


def test_the_key_of_another_address_is_not_sent_to_a_context(machine: Machine) -> None:
    machine.up("first")
    machine.env |= {"CORRAL_URL": "http://elsewhere:1", "CORRAL_KEY": "ck_elsewhere"}
    assert find_endpoint(env=machine.env).url == "http://elsewhere:1"
    found = find_endpoint(env=machine.env, context="first")
    assert (found.url, found.key) == ("http://127.0.0.1:8001", "ck_first")


def test_the_local_file_of_an_earlier_version_is_still_read(machine: Machine) -> None:
    write_local(local_file(machine.env), machine.run("old"))
    assert machine.target() == "local"
    assert machine.up("new") == "new"
    assert machine.target() == "local"  # it runs, and was there first
    assert machine.target(context="new") == "new"
    machine.stop("old")
    assert machine.target() == "new"
    assert not local_file(machine.env).exists()


def test_an_upgraded_fleet_is_not_listed_twice(machine: Machine) -> None:
    write_local(local_file(machine.env), machine.run("old"))
    machine.kill("old")
    machine.up("old")
    assert [each.name for each in list_contexts(machine.env)] == ["old"]


def test_only_the_entry_of_a_fleet_that_does_not_run_is_deleted(machine: Machine) -> None:
    machine.up("first")
    use_context(machine.env, "first")
    with pytest.raises(Conflict, match="stop it first"):
        delete_context(machine.env, "first")
    machine.kill("first")
    delete_context(machine.env, "first")
    assert list_contexts(machine.env) == []
    assert machine.up("second") == "second"
    assert machine.target() == "second"


def test_entries_are_private_and_damaged_ones_are_as_good_as_none(machine: Machine) -> None:
    machine.up("first")
    folder = machine.root / "config" / "contexts"
    assert stat.S_IMODE((folder / "first.json").stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    (folder / "broken.json").write_text("{")
    (folder / ".hidden.json").write_text("{}")
    (machine.root / "config" / "current-context").write_bytes(b"\xff")
    assert [each.name for each in list_contexts(machine.env)] == ["first"]
    assert machine.target() == "first"


@pytest.mark.parametrize("bad", ["", "-rf", "a/b", "..", "a b", ".x", "ä", "x" * 64])
def test_names_that_cannot_be_files_are_refused(bad: str) -> None:
    with pytest.raises(Invalid, match="cannot name a context"):
        check_context_name(bad)


def test_fleets_that_start_at_once_get_different_names(machine: Machine) -> None:
    fleets = [machine.run(f"{number}/data") for number in range(8)]
    begin = threading.Barrier(len(fleets))
    names: list[str] = []

    def claim(fleet: LocalFleet) -> None:
        begin.wait()
        names.append(claim_context(machine.env, fleet).name)

    threads = [threading.Thread(target=claim, args=(fleet,)) for fleet in fleets]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert sorted(names) == ["data", *(f"data-{number}" for number in range(2, 9))]
