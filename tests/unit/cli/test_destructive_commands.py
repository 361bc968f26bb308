"""Where several fleets run on a machine, a destructive command names the fleet that it would change."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import corral.client
from corral.cli.commands import COMMANDS
from corral.cli.common.fleet_command import IS_DESTRUCTIVE
from corral.cli.main import main
from corral.cli.run import load
from corral.client import Endpoint

CLI_PAGE = Path(__file__).parents[3] / "docs" / "reference" / "cli.md"
CONNECTION = {"url", "key", "ca", "context"}

# Every command that connects to a fleet is in one of these. A command is destructive if it stops, overwrites or deletes
# something; its arguments here do that.
DESTRUCTIVE = {
    "nodes drain": ("attic",),
    "nodes delete": ("attic",),
    "nodes replace": ("attic",),
    "nodes label": ("attic", "room-"),
    "nodes budget": ("attic", "1GB"),
    "nodes max-replicas": ("attic", "1"),
    "token revoke": ("id",),
    "keys revoke": ("id",),
    "backends upgrade": ("llama-cpp",),
    "backends rollback": ("llama-cpp",),
    "backends delete": ("llama-cpp",),
    "models install": ("m", "--replace"),
    "models edit": ("m", "--set", "a=1"),
    "models delete": ("m",),
    "models unload": ("m",),
    "models gc": (),
    "bundle rm": ("0123",),
    "models scale": ("m", "--max", "1"),
    "apply": ("--file", "fleet.yaml"),
    "ops cancel": ("3f2a91c0",),
    "ops withdraw": ("3f2a91c0",),
    "ops history": ("--clear",),
    "fleet upgrade": (),
    "fleet release-trust": ("KEY",),
    "rollouts pause": ("3f2a91c0",),
    "rollouts promote": ("3f2a91c0",),
    "rollouts abort": ("3f2a91c0",),
}
HARMLESS = {
    "nodes list",
    "nodes show",
    "nodes approve",
    "nodes resume",
    "token create",
    "token list",
    "keys create",
    "keys list",
    "backends available",
    "backends list",
    "backends show",
    "backends install",
    "backends upgrades",
    "backends verify",
    "models available",
    "bundle create",
    "bundle load",
    "bundle list",
    "models list",
    "models show",
    "models load",
    "models replicas",
    "models files",
    "models stage",
    "export",
    "fleet releases",
    "fleet release-add",
    "chat",
    "run",
    "ps",
    "pull",
    "logs",
    "why model",
    "why node",
    "why op",
    "why operation",
    "why rollout",
    "rollouts list",
    "rollouts show",
    "rollouts resume",
    "ops list",
    "ops show",
    "ops watch",
    "ops retry",
    "ops dismiss",
    "requests",
    "top",
    "fleet versions",
    "doctor",
    "support-bundle",
}
TWO_FLEETS = Endpoint("http://here:1", "ck_x", data="/data/a", context="a", others=("'b' (http://here:2, /data/b)",))


def commands() -> Iterator[tuple[str, Any]]:
    for name in COMMANDS:
        command = load(name)
        inner = getattr(command, "commands", None)
        yield from ((f"{name} {each}", found) for each, found in inner.items()) if inner else [(name, command)]


def remote_commands() -> dict[str, Any]:
    return {path: each for path, each in commands() if {given.name for given in each.params} >= CONNECTION}


def test_every_command_is_listed_as_destructive_or_harmless() -> None:
    found = remote_commands()
    assert found.keys() == DESTRUCTIVE.keys() | HARMLESS, "a new command belongs into one of the lists above"
    assert {path for path, each in found.items() if hasattr(each.callback, IS_DESTRUCTIVE)} == DESTRUCTIVE.keys()


@pytest.mark.parametrize("path", DESTRUCTIVE)
def test_it_changes_nothing_before_the_fleet_is_named(
    path: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(corral.client, "find_endpoint", lambda **_: TWO_FLEETS)
    monkeypatch.setattr(corral.client, "Client", None)  # no request is sent
    assert main([*path.split(), *DESTRUCTIVE[path]]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "this command would change the fleet 'a' (http://here:1, /data/a), not 'b' (http://here:2, /data/b)" in said
    assert "--context, or add --yes" in said


@pytest.mark.parametrize("words", [("nodes", "label", "attic"), ("ops", "history"), ("models", "install", "m")])
def test_the_same_command_without_its_destructive_option_continues(words: tuple[str, ...], monkeypatch: Any) -> None:
    class Called(Exception):
        pass

    def call(*_: object, **__: object) -> None:
        raise Called

    monkeypatch.setattr(corral.client, "find_endpoint", lambda **_: TWO_FLEETS)
    monkeypatch.setattr(corral.client, "Client", call)
    with pytest.raises(Called):
        main(list(words))


@pytest.mark.parametrize("path", DESTRUCTIVE)
def test_the_reference_names_it(path: str) -> None:
    (paragraph,) = [part for part in CLI_PAGE.read_text().split("\n\n") if part.startswith("Where several fleets run")]
    assert path.rpartition(" ")[2] in paragraph
