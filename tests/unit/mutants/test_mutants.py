"""The mutation tool: what it changes, how it names a change, which tests it runs, and that it leaves no trace."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mutants.catalog import Catalog, PlantedFault, UnknownMutant
from tests.mutants.covering import ImportGraph
from tests.mutants.main import main
from tests.mutants.operators import SourceText, changes_of, functions_in
from tests.mutants.state import State
from tests.mutants.trial import Trial, Verdict, WorkingCopy

ROOT = Path(__file__).parents[3]

SOURCE = '''
"""Ärger: bytes are no characters."""


class Shelf:
    def takes(self, size: int) -> bool:
        """1 < 2 and not 0"""
        if size < 1:
            return False
        self.count = min(size, 0)
        log.info("taken", size=size)
        print("é", size + 1)
        return not self.full and size <= self.room
'''


def mutated(operator: str) -> list[str]:
    """The changed lines, one per mutant."""
    tree, text = ast.parse(SOURCE), SourceText(SOURCE)
    found = []
    for name, function in functions_in(tree).items():
        for change in changes_of(name, function, text):
            if change.operator == operator:
                after = change.edit.apply(SOURCE)
                ast.parse(after)
                found += [line.strip() for line in after.splitlines() if line not in SOURCE.splitlines()]
    return found


@pytest.mark.parametrize(
    ("operator", "lines"),
    [
        ("compare", ["if size <= 1:", "return not self.full and size < self.room"]),
        ("bool", ["return not self.full or size <= self.room"]),
        ("arith", ['print("é", size - 1)']),
        ("not", ["return (self.full) and size <= self.room"]),
        ("constant", ["if size < 0:", "return True", "self.count = min(size, 1)", 'print("é", size + 0)']),
        ("minmax", ["self.count = max(size, 0)"]),
        ("guard", ["pass"]),
        ("drop", ["pass", "pass"]),
    ],
)
def test_each_operator_changes_one_place_of_the_text(operator: str, lines: list[str]) -> None:
    assert mutated(operator) == lines


def a_tree(tmp_path: Path, module: str, source: str = SOURCE) -> Path:
    path = tmp_path.joinpath("src", *module.split(".")).with_suffix(".py")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(source)
    return tmp_path


FAULT = PlantedFault("no-room", "corral.shelf", "Shelf.takes", "size <= self.room", "True", "it takes too much")


def test_a_fault_is_found_after_lines_moved_and_its_file_was_renamed(tmp_path: Path) -> None:
    at_home = Catalog(a_tree(tmp_path / "one", "corral.shelf")).planted(FAULT)
    moved = Catalog(a_tree(tmp_path / "two", "corral.storage.rack", f"X = 1\n\n{SOURCE}")).planted(FAULT)
    assert (at_home.module, moved.module) == ("corral.shelf", "corral.storage.rack")
    for mutant in (at_home, moved):
        changed = [line for line in mutant.diff().splitlines() if line.startswith(("-  ", "+  "))]
        assert changed == [
            "-        return not self.full and size <= self.room",
            "+        return not self.full and True",
        ]


def test_a_fault_that_cannot_be_planted_is_said_and_not_passed_over(tmp_path: Path) -> None:
    root = a_tree(tmp_path, "corral.shelf", SOURCE.replace("size <= self.room", "self.room >= size"))
    with pytest.raises(UnknownMutant, match="is found nowhere"):
        Catalog(root).planted(FAULT)
    a_tree(tmp_path, "corral.shelf")
    a_tree(tmp_path, "corral.rack")
    with pytest.raises(UnknownMutant, match=r"corral\.rack, corral\.shelf"):
        Catalog(root).planted(PlantedFault("x", "corral.gone", "Shelf.takes", "size <= self.room", "True", ""))


def test_the_seed_chooses_and_names_find_the_same_mutant(tmp_path: Path) -> None:
    catalog = Catalog(a_tree(tmp_path, "corral.shelf"))
    chosen = catalog.choose(4, 7, ["corral"])
    assert [one.name for one in chosen] == [one.name for one in catalog.choose(4, 7, ["corral"])]
    assert len({one.source for one in chosen}) == 4
    moved = Catalog(a_tree(tmp_path / "moved", "corral.rack"))
    assert [moved.named(one.name).source for one in chosen] == [one.source for one in chosen]
    with pytest.raises(UnknownMutant):
        catalog.named("corral.shelf:Shelf.takes#compare.9")


def test_tests_that_import_a_module_come_first() -> None:
    graph = ImportGraph(ROOT)
    files = [path.name for path in graph.tests_of("corral.controller.scheduler.free_memory", "unit", max_distance=1)]
    assert files.index("test_free_memory.py") < files.index("test_eviction.py")
    integration = graph.tests_of("corral.controller.registry.heartbeats", "integration", max_distance=0)
    assert Path("tests/integration/controller/test_heartbeat_batches.py") in integration, "by way of tests/support"


def a_checkout(tmp_path: Path) -> Path:
    root = a_tree(tmp_path / "checkout", "corral.shop", "def is_full(size: int) -> bool:\n    return size > 3\n")
    (root / "src/corral/__init__.py").touch()
    test = root / "tests/unit/test_shop.py"
    test.parent.mkdir(parents=True)
    test.write_text(
        "from corral.shop import is_full\n\n\ndef test_it():\n    assert is_full(5)\n    assert not is_full(3)\n"
    )
    (root / "pyproject.toml").write_text("[tool.pytest.ini_options]\naddopts = '--import-mode=importlib'\n")
    (root / ".gitignore").write_text(".venv\n.corral\n")
    (root / ".venv").symlink_to(sys.prefix)
    subprocess.run(["git", "init", "-q", str(root)], check=True)
    return root


@pytest.mark.timeout(300)
def test_a_mutant_is_caught_or_survives_and_the_checkout_stays_as_it_is(tmp_path: Path) -> None:
    root = a_checkout(tmp_path)
    stale = root / ".corral/mutants/tree-999999999"
    stale.mkdir(parents=True)
    before = (root / "src/corral/shop.py").read_text()
    catalog = Catalog(root)
    copy = WorkingCopy(root, root / ".corral/mutants")
    try:
        trial = Trial(copy, kinds=("unit",))
        verdicts = {one.name: trial.run(one) for one in catalog.generic(["corral"])}
    finally:
        copy.close()
    assert verdicts["corral.shop:is_full#compare.1"].caught_by == "tests/unit/test_shop.py::test_it"
    survives = PlantedFault("four", "corral.shop", "is_full", "size > 3", "size > 4", "")
    copy = WorkingCopy(root, root / ".corral/mutants")
    try:
        assert Trial(copy, kinds=("unit",)).run(catalog.planted(survives)).survived
        assert (copy.root / "src/corral/shop.py").read_text() == before
    finally:
        copy.close()
    assert (root / "src/corral/shop.py").read_text() == before
    assert list((root / ".corral/mutants").iterdir()) == [], "nothing is left, not even of a run that was killed"


@pytest.mark.timeout(300)
def test_a_test_that_fails_anyway_catches_nothing(tmp_path: Path) -> None:
    root = a_checkout(tmp_path)
    (root / "tests/unit/test_shop.py").write_text("import corral.shop\n\n\ndef test_it():\n    assert False\n")
    copy = WorkingCopy(root, root / ".corral/mutants")
    try:
        [mutant] = Catalog(root).generic(["corral"])
        verdict = Trial(copy, kinds=("unit",)).run(mutant)
    finally:
        copy.close()
    assert verdict.survived
    assert verdict.unsure == ("tests/unit/test_shop.py::test_it",)


def test_results_are_kept_until_the_source_or_the_choice_of_tests_changes(tmp_path: Path) -> None:
    path, root = tmp_path / "state.json", a_tree(tmp_path, "corral.shelf")
    mutant = Catalog(root).planted(FAULT)
    State(path, kinds=("unit",), seeds=5).put(mutant, Verdict("tests/a.py::test", "because"))
    assert State(path, kinds=("unit",), seeds=5).find(mutant) == Verdict("tests/a.py::test", "because")
    assert State(path, kinds=("unit",), seeds=6).find(mutant) is None
    a_tree(tmp_path, "corral.shelf", f"# another comment\n{SOURCE}")
    assert State(path, kinds=("unit",), seeds=5).find(Catalog(root).planted(FAULT)) is None


def test_the_command_lists_what_it_would_plant(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list", "--json", "--only", "reap-busy-leftover"]) == 0
    [row] = json.loads(capsys.readouterr().out)
    assert (row["name"], row["module"]) == ("reap-busy-leftover", "corral.controller.replicas.plan")
    assert main(["--only", "no-such-fault"]) == 2
    assert "no-such-fault" in capsys.readouterr().err
