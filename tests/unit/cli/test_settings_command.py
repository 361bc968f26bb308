"""Flags, environment and help of a role come from its settings."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import pytest

from corral.cli.common import declare
from corral.cli.common.settings_command import settings_command
from corral.kit.settings import BadSettings, Seconds, setting


@dataclass(frozen=True)
class Settings:
    data: Path = setting("folder", default=Path("/d"))
    wait_s: Seconds = setting("how long", default=Seconds(90))
    urls: tuple[str, ...] = setting("where", default=())
    loud: bool = setting("noise", default=False)
    count: int = setting("how many", default=3, advanced=True)


def run(words: list[str], env: dict[str, str] | None = None, **more: Any) -> list[Settings]:
    ran: list[Settings] = []

    def keep(settings: Settings) -> int:
        ran.append(settings)
        return 7

    app = declare.App()
    app.command("x")(settings_command(Settings, keep, help="Do it.", env=env or {}, **more))
    code = app.build().main(args=words, prog_name="x", standalone_mode=False)
    assert code in (0, 7, 9)
    return ran


def test_nothing_given_means_the_defaults() -> None:
    assert run([]) == [Settings()]


def test_flags_win_over_the_environment_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "s.toml"
    file.write_text('wait = "3s"\ncount = 8\nloud = true\n')
    env = {"CORRAL_WAIT": "2m", "CORRAL_COUNT": "5"}
    found = run(["--wait", "1h", "--config", str(file)], env)
    assert found == [Settings(wait_s=Seconds(3600), count=5, loud=True)]


@pytest.mark.parametrize("given", [["--urls", "a,b"], ["--urls", "a", "--urls", "b"]])
def test_a_list_with_commas_or_by_repeating(given: list[str]) -> None:
    assert run(given)[0].urls == ("a", "b")


def test_a_switch_can_be_turned_off_against_the_environment() -> None:
    assert run(["--no-loud"], {"CORRAL_LOUD": "true"})[0].loud is False
    assert run(["--loud"])[0].loud is True


def test_every_fault_is_told_at_once() -> None:
    with pytest.raises(BadSettings) as told:
        run(["--wait", "soon", "--count", "x"], {"CORRAL_LOUD": "perhaps"})
    assert len(told.value.faults) == 3


def test_short_help_hides_the_advanced_and_help_all_shows_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--help"]) == []
    short = capsys.readouterr().out
    assert "--count" not in short
    assert "how long [default: 1m30s] (CORRAL_WAIT)" in " ".join(short.split())
    assert run(["--help-all"]) == []
    assert "--count N" in capsys.readouterr().out


def test_further_arguments_and_a_reader_that_ends_it() -> None:
    argument = {"url": Annotated[str | None, declare.Argument()]}
    assert run(["here"], arguments=argument, read=lambda given: {"data": given["url"]})[0].data == Path("here")
    assert run(["here"], arguments=argument, read=lambda given: 9) == []
