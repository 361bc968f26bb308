"""A second worker on one machine, or cloned machines: the host name and the usual port are taken, and that is fine."""

from __future__ import annotations

from pathlib import Path

from corral.worker.agent.join.identity import IdentityFile, another_name


def test_another_name_is_the_same_on_every_try_and_differs_between_workers() -> None:
    assert another_name("box", "ce_one") == another_name("box", "ce_one")
    assert another_name("box", "ce_one") != another_name("box", "ce_two")
    assert another_name("box", "ce_one").startswith("box-")
    assert len(another_name("x" * 255, "ce_one")) == 255


def test_a_name_nobody_chose_is_remembered_as_such(tmp_path: Path) -> None:
    first = IdentityFile.open(tmp_path, name="")
    assert not first.current.name_was_chosen
    assert not IdentityFile.open(tmp_path, name="").current.name_was_chosen
    assert IdentityFile.open(tmp_path, name="mine").current.name_was_chosen
