"""`scripts/codebase` on a tiny tree."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest

from tests.support.scripts import ROOT, load_script

codebase = load_script("codebase")

LOOP = """
    async def {name}({argument}):
        \"\"\"{name} of its own.\"\"\"
        {result} = []
        for {item} in {argument}:  # a comment
            if {item}.ready:
                {result}.append({item}.key)
            else:
                log.info("{name}", key={item}.key)
        return {result}
"""


def write(root: Path, modules: dict[str, str]) -> Path:
    for name, text in modules.items():
        path = root / "src" / "corral" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(dedent(text))
    return root


def test_words_to_avoid_are_whole_words_of_names(tmp_path: Path) -> None:
    text = """
    class ModelWay:
        def gateway(self, asked_of, in_flight, flight):
            self.door = heard_it = asked_of
    """
    found = codebase.measure(write(tmp_path, {"a.py": text}))
    assert found.values["names with a word to avoid"] == 5
    assert [line.split()[1] for line in found.details["words"] if line.startswith("src/")] == [
        *("ModelWay", "asked_of", "flight", "door", "heard_it")
    ]


@pytest.mark.parametrize("name", ["look", "_look", "MOST_BYTES", "_MOST_BYTES", "run_to_the_end", "CannotGoOn"])
def test_whole_names_limits_and_phrases_are_found_too(name: str) -> None:
    assert len(list(codebase.words_to_avoid(name))) == 1


@pytest.mark.parametrize("name", ["look_up", "outlook", "most_recent", "AT_MOST", "to_the_ending", "SingleFlight"])
def test_names_that_only_look_like_them_are_fine(name: str) -> None:
    assert not list(codebase.words_to_avoid(name))


def test_a_word_of_another_standard_is_fine_in_its_place(tmp_path: Path) -> None:
    tree = write(tmp_path, {"inference/speech.py": "voice = 1\n", "worker/orders.py": "voice = 2\n"})
    hits = [line for line in codebase.measure(tree).details["words"] if line.startswith("src/")]
    assert hits == ["src/corral/worker/orders.py:1 voice"]


def test_a_class_name_is_common_from_the_third_on(tmp_path: Path) -> None:
    twice, thrice = "class Twice: ...\n", "class Thrice: ...\n"
    found = codebase.measure(write(tmp_path, {"a.py": twice + thrice, "b.py": twice + thrice, "c.py": thrice}))
    assert found.details["classes"] == ["Thrice: src/corral/a.py:2 src/corral/b.py:2 src/corral/c.py:1"]


def test_cycles_are_found_between_sub_packages_of_one_package(tmp_path: Path) -> None:
    modules = {
        "controller/api/routes.py": "import corral.controller.web.page\nfrom corral.controller.rules import x",
        "controller/web/page.py": "def show():\n    from corral.controller.api import routes",
        "controller/rules.py": "from corral.worker.agent import y",
        "worker/agent/main.py": "from corral.controller.api import routes",
    }
    assert codebase.find_cycles(codebase.read_modules(write(tmp_path, modules))) == [
        ["controller.api", "controller.web"]
    ]


def test_functions_that_differ_in_names_and_texts_are_a_pair(tmp_path: Path) -> None:
    one = LOOP.format(name="one", argument="rows", result="keys", item="row")
    other = LOOP.format(name="other", argument="nodes", result="found", item="node")
    different = LOOP.format(name="another", argument="rows", result="keys", item="row").replace(".key", ".id")
    found = codebase.measure(write(tmp_path, {"a.py": one, "b.py": other, "c.py": different}))
    assert found.values["pairs of duplicated code"] == 1
    assert found.details["duplicates"] == ["   8 src/corral/a.py:2 one ~ src/corral/b.py:2 other"]


def test_a_comparison_is_a_table_of_before_and_after(tmp_path: Path) -> None:
    before = write(tmp_path / "before", {"a.py": "x = 1\n" * 50, "b.py": "y = 2\n"})
    after = write(tmp_path / "after", {"a.py": "def f():\n    return 1\n"})
    reports = []
    for name, seconds in (("before", 900), ("after", 690)):
        reports.append(tmp_path / f"{name}.xml")
        reports[-1].write_text(f'<testsuites><testsuite name="pytest" time="{seconds}"/></testsuites>')
        (tmp_path / f"{name}.json").write_text('{"mutants": [{}, {}], "survivors": ["one"]}')
    mutants = [str(report.with_suffix(".json")) for report in reports]
    words = ["--compare", str(before), "--root", str(after), "--junit", *map(str, reports), "--mutants", *mutants]
    command = [sys.executable, str(ROOT / "scripts" / "codebase"), *words]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    assert ran.stdout.splitlines()[:4] == [
        "| figure | before | after |",
        "|---|---:|---:|",
        "| modules | 2 | 1 |",
        "| lines | 51 | 2 |",
    ]
    assert "| test minutes | 15 | 11.5 |" in ran.stdout
    assert "| mutants caught | 1 | 1 |" in ran.stdout


def test_an_unknown_figure_is_refused_with_those_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, {"a.py": "def f(): ...\n"})
    monkeypatch.setattr(sys, "argv", ["codebase", "--root", str(tmp_path), "--list", "wrods"])
    with pytest.raises(SystemExit, match="2"):
        codebase.main()
    assert "classes, cycles, duplicates, functions, small, words" in capsys.readouterr().err
