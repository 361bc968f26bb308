"""Settings: where they come from, which wins, and that every fault is told at once by the words the person used."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from corral.kit.settings import (
    BadSettings,
    Seconds,
    describe,
    group,
    read_settings,
    setting,
    shown,
    shown_changes,
    value_of,
)


@dataclass(frozen=True)
class Example:
    url: str = setting("where to go")
    interval_s: Seconds = setting("how often", default=Seconds(10), aliases=("LOCALAI_INTERVAL",))
    port: int = setting("port", default=8080, check=lambda value: None if 0 <= value < 65536 else "is no port")
    open: bool = setting("open", default=False)
    names: tuple[str, ...] = setting("names", default=())
    data: Path | None = setting("folder", default=None)
    token: str = setting("secret word", default="", secret=True)


def test_flags_win_over_environment_over_file_over_default(tmp_path: Path) -> None:
    file = tmp_path / "corral.toml"
    file.write_text('url = "file"\ninterval = "3s"\nport = 1\nnames = ["a", "b"]\n')
    settings = read_settings(
        Example, flags={"port": "3"}, env={"CORRAL_PORT": "2", "CORRAL_INTERVAL": "5m", "CORRAL_OPEN": "yes"}, file=file
    )
    assert settings == Example(url="file", interval_s=Seconds(300), port=3, open=True, names=("a", "b"))


def test_aliases_are_read_and_our_own_name_wins() -> None:
    assert read_settings(Example, flags={"url": "u"}, env={"LOCALAI_INTERVAL": "7"}).interval_s == Seconds(7)
    both = {"LOCALAI_INTERVAL": "7", "CORRAL_INTERVAL": "8"}
    assert read_settings(Example, flags={"url": "u"}, env=both).interval_s == Seconds(8)


def test_an_empty_variable_counts_as_not_set() -> None:
    assert read_settings(Example, flags={"url": "u"}, env={"CORRAL_PORT": ""}).port == 8080


def test_all_faults_are_told_at_once_by_the_name_the_person_used() -> None:
    env = {"CORRAL_INTERVAL": "-3s", "CORRAL_PORT": "99999", "CORRAL_OPEN": "perhaps"}
    with pytest.raises(BadSettings) as caught:
        read_settings(Example, flags={}, env=env)
    assert len(caught.value.faults) == 4
    assert caught.value.faults[0].startswith("--url (or CORRAL_URL) is required")
    assert "CORRAL_INTERVAL" in caught.value.message
    assert "negative" in caught.value.message
    assert "CORRAL_PORT: is no port" in caught.value.message
    assert "CORRAL_OPEN: 'perhaps' is neither true nor false" in caught.value.message


def test_an_unknown_key_in_the_file_is_a_fault(tmp_path: Path) -> None:
    file = tmp_path / "corral.toml"
    file.write_text('url = "u"\nprot = 1\n')
    with pytest.raises(BadSettings, match="unknown setting 'prot'"):
        read_settings(Example, flags={}, env={}, file=file)


@pytest.mark.parametrize("content", ["port = = 3", "\xff"])
def test_a_file_that_is_not_toml_is_a_fault(tmp_path: Path, content: str) -> None:
    file = tmp_path / "corral.toml"
    file.write_bytes(content.encode("latin-1"))
    with pytest.raises(BadSettings, match="not TOML"):
        read_settings(Example, flags={"url": "u"}, env={}, file=file)


def test_secrets_are_never_shown() -> None:
    settings = read_settings(Example, flags={"url": "u", "token": "hunter2hunter2"}, env={})
    assert "hunter2" not in str(shown(settings))
    assert shown(settings)["token"] == "set"
    assert shown(settings)["interval_s"] == "10s"


def test_a_log_at_start_has_what_differs_from_the_defaults() -> None:
    settings = read_settings(Example, flags={"url": "u", "token": "hunter2hunter2"}, env={})
    assert shown_changes(settings) == {"url": "u", "token": "set"}


def test_the_description_has_flag_variable_kind_and_default() -> None:
    rows = {doc.name: doc for doc in describe(Example)}
    assert rows["interval_s"].flag == "--interval"
    assert rows["interval_s"].env == "CORRAL_INTERVAL"
    assert rows["interval_s"].kind == "duration"
    assert rows["interval_s"].default == "10s"
    assert rows["url"].default == "required"


@dataclass(frozen=True)
class Limits:
    first: int = setting("lower limit", default=1)
    last: int = setting("upper limit", default=9)

    def __post_init__(self) -> None:
        if self.last < self.first:
            raise BadSettings(["last is less than first"])


@dataclass(frozen=True)
class Paths:
    data: Path | None = setting("folder", default=None)
    cache: Path | None = setting("folder of the cache", default=None)

    def __post_init__(self) -> None:
        if self.cache is not None and self.data is None:
            raise BadSettings(["cache needs data"])


@dataclass(frozen=True)
class Grouped:
    limits: Limits = group(Limits)
    paths: Paths = group(Paths)
    open: bool = setting("open", default=False)


def test_a_group_is_read_by_the_names_of_its_settings() -> None:
    settings = read_settings(Grouped, flags={"open": True, "last": "4"}, env={"CORRAL_DATA": "/d"})
    assert settings == Grouped(Limits(last=4), Paths(data=Path("/d")), open=True)
    assert [value_of(settings, name) for name in ("first", "last", "data", "open")] == [1, 4, Path("/d"), True]
    with pytest.raises(KeyError):
        value_of(settings, "limits")


def test_groups_are_described_and_shown_setting_by_setting() -> None:
    assert [doc.name for doc in describe(Grouped)] == ["first", "last", "data", "cache", "open"]
    assert shown(Grouped())["last"] == "9"


def test_faults_of_all_groups_are_told_at_once() -> None:
    with pytest.raises(BadSettings) as caught:
        read_settings(Grouped, flags={"last": "0", "cache": "/c"}, env={})
    assert caught.value.faults == ("last is less than first", "cache needs data")
