"""`corral` alone, the names from Ollama, and what shells complete."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from corral.cli.fleet.overview import next_command, overview_lines
from corral.cli.main import main
from corral.cli.models.short_commands import hub_source
from corral.contract.admin import NodeView, OperationView
from corral.contract.catalogue import ModelView
from tests.integration.cli.conftest import Corral
from tests.support.scripted_fleet import node


def nodes(*states: str) -> list[NodeView]:
    return [NodeView(name=f"n{at}", status=state) for at, state in enumerate(states)]


def model(name: str, ready: int = 0, **more: Any) -> ModelView:
    return ModelView(id=name, ready=ready, **more)


@pytest.mark.parametrize(
    ("states", "models", "operations", "command"),
    [
        ((), [], 0, "corral token create"),
        (("healthy", "pending"), [], 3, "corral nodes approve n1"),
        (("offline",), [], 0, "corral doctor"),
        (("healthy", "unhealthy"), [model("m", 1)], 0, "corral doctor"),
        (("healthy",), [model("m")], 1, "corral ops watch"),
        (("healthy",), [], 0, 'corral chat smollm2-135m "Hello"'),
        (
            ("healthy",),
            [model("cold"), model("warm", 2), model("off", 3, disabled=True)],
            0,
            'corral chat warm "Hello"',
        ),
    ],
)
def test_the_next_command_is_the_most_urgent_one(
    states: tuple[str, ...], models: list[ModelView], operations: int, command: str
) -> None:
    assert next_command(nodes(*states), models, [OperationView()] * operations).startswith(command)


def test_the_state_in_four_lines() -> None:
    lines = list(overview_lines("http://f:1", nodes("healthy", "pending", "healthy"), [model("a", 1), model("b")], []))
    assert lines == [
        "fleet       http://f:1",
        "nodes       2 healthy, 1 pending",
        "models      2 installed, 1 ready",
        "operations  none open",
    ]


def test_corral_alone_shows_the_fleet_and_what_to_do(corral: Corral) -> None:
    corral.fleet.nodes.append(node("shed", "pending"))
    ran = corral()
    assert ran.code == 0
    assert corral.fleet.url in ran.out
    assert "Next: corral nodes approve" in ran.out


@pytest.mark.usefixtures("no_fleet")
def test_corral_alone_without_a_fleet_says_how_to_begin(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("No fleet runs on this machine.\n")
    assert "corral up --lan" in shown


def test_corral_alone_with_a_fleet_that_is_away(corral: Corral, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CORRAL_URL", "http://127.0.0.1:9")
    ran = corral()
    assert (ran.code, ran.out) == (1, "Next: corral doctor\n")
    assert "127.0.0.1:9" in ran.err


@pytest.mark.parametrize(
    ("given", "source"),
    [
        ("hf.co/owner/repo:Q4_K_M", "hf://owner/repo:Q4_K_M"),
        ("huggingface.co/owner/repo", "hf://owner/repo"),
        ("smollm2-135m", "smollm2-135m"),
    ],
)
def test_a_repository_in_the_spelling_of_ollama_is_understood(given: str, source: str) -> None:
    assert hub_source(given) == source


# Completion


def complete(corral: Corral, monkeypatch: pytest.MonkeyPatch, words: str) -> list[str]:
    """What bash is offered after these words."""
    monkeypatch.setenv("_CORRAL_COMPLETE", "bash_complete")
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", str(words.count(" ")))
    ran = corral()
    assert ran.err == ""
    return [line.partition(",")[2] for line in ran.out.splitlines() if line]


def test_commands_options_and_names_are_completed(corral: Corral, monkeypatch: pytest.MonkeyPatch) -> None:
    corral.fleet.nodes = [node("attic"), node("annex"), node("barn")]
    assert complete(corral, monkeypatch, "corral mo") == ["models"]
    assert "list" in complete(corral, monkeypatch, "corral nodes ")
    assert complete(corral, monkeypatch, "corral nodes list --j") == ["--json"]
    assert complete(corral, monkeypatch, "corral nodes show a") == ["annex", "attic"]
    assert complete(corral, monkeypatch, "corral nodes drain attic b") == ["barn"]
    assert complete(corral, monkeypatch, "corral completion z") == ["zsh"]


def test_a_fleet_that_cannot_be_asked_completes_nothing(corral: Corral, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CORRAL_URL", "http://127.0.0.1:9")
    assert complete(corral, monkeypatch, "corral nodes show ") == []
    monkeypatch.delenv("CORRAL_URL")
    monkeypatch.delenv("CORRAL_KEY")
    assert complete(corral, monkeypatch, "corral nodes show ") == []


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_reads_its_script(corral: Corral, shell: str) -> None:
    ran = corral("completion", shell)
    assert ran.code == 0
    assert f"{shell}_complete" in ran.out
    if program := shutil.which(shell):
        subprocess.run([program, "-n"], input=ran.out, text=True, timeout=30, check=True)


def test_bash_completes_a_name_of_the_fleet(corral: Corral, tmp_path: Path) -> None:
    """The script in a real bash, with a `corral` on its path."""
    corral.fleet.nodes = [node("attic")]
    script = corral("completion", "bash").out
    asked = "COMP_WORDS=(corral nodes show a); COMP_CWORD=3; _corral_completion corral; echo ${COMPREPLY[@]}"
    launcher = tmp_path / "corral"
    launcher.write_text(f'#!/bin/sh\nexec {sys.executable} -P -m corral.cli.main "$@"\n')
    launcher.chmod(0o755)
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    ran = subprocess.run(
        ["bash", "--norc", "-c", f"{script}\n{asked}"], env=env, capture_output=True, text=True, timeout=60
    )
    assert ran.stdout == "attic\n", ran.stderr


def test_an_unknown_shell_is_refused(corral: Corral, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHELL", "/bin/tcsh")
    ran = corral("completion")
    assert (ran.code, "no completion for 'tcsh': give bash, zsh or fish" in ran.err) == (2, True)
