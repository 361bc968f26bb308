"""Where the fleet is: flags before environment before the fleet of this machine, and no key to a stranger."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from corral.client import LocalFleet, find_endpoint, local_file, read_local, write_local
from corral.client.endpoint import check_url, same_place
from corral.kit.errors import Invalid


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    return {"CORRAL_CONFIG_DIR": str(tmp_path / "config"), "HOME": str(tmp_path)}


@pytest.fixture
def running(tmp_path: Path, env: dict[str, str]) -> dict[str, str]:
    """A fleet runs on this machine."""
    (tmp_path / "admin.key").write_text("ck_local\n")
    fleet = LocalFleet(
        url="https://127.0.0.1:8080",
        data=str(tmp_path),
        admin_key_file=str(tmp_path / "admin.key"),
        ca_file="/data/ca.crt",
        pid=os.getpid(),
    )
    write_local(local_file(env), fleet)
    return env


def test_nothing_known_says_what_to_do(env: dict[str, str]) -> None:
    with pytest.raises(Invalid, match="corral up"):
        find_endpoint(env=env)


def test_the_local_fleet_is_found_with_its_key_and_ca(running: dict[str, str]) -> None:
    found = find_endpoint(env=running)
    assert (found.url, found.key, found.ca) == ("https://127.0.0.1:8080", "ck_local", "/data/ca.crt")


def test_flags_win_over_environment_and_environment_over_the_local_fleet(running: dict[str, str]) -> None:
    env = {**running, "CORRAL_URL": "http://env:1", "CORRAL_KEY": "ck_env", "CORRAL_CA": "env.pem"}
    found = find_endpoint(env=env)
    assert (found.url, found.key, found.ca) == ("http://env:1", "ck_env", "env.pem")
    found = find_endpoint(url="http://flag:2", key="ck_flag", ca="flag.pem", env=env)
    assert (found.url, found.key, found.ca) == ("http://flag:2", "ck_flag", "flag.pem")


def test_the_local_key_is_never_sent_elsewhere(running: dict[str, str]) -> None:
    with pytest.raises(Invalid, match="no key"):
        find_endpoint(url="https://evil.example:8080", env=running)
    with pytest.raises(Invalid, match="no key"):
        find_endpoint(url="https://127.0.0.1:9999", env=running)


def test_the_local_fleet_named_by_its_url_needs_no_key(running: dict[str, str]) -> None:
    found = find_endpoint(url="https://localhost:8080/", env=running)
    assert (found.url, found.key, found.ca) == ("https://localhost:8080", "ck_local", "/data/ca.crt")


def test_a_key_may_lie_in_a_file(env: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "k").write_text("  ck_file\n")
    assert find_endpoint(url="http://x:1", env={**env, "CORRAL_KEY_FILE": str(tmp_path / "k")}).key == "ck_file"
    (tmp_path / "k").write_text("")
    with pytest.raises(Invalid, match="does not hold a key"):
        find_endpoint(url="http://x:1", env={**env, "CORRAL_KEY_FILE": str(tmp_path / "k")})
    with pytest.raises(Invalid, match="No such file"):
        find_endpoint(url="http://x:1", env={**env, "CORRAL_KEY_FILE": str(tmp_path / "absent")})


def test_the_key_is_not_in_the_repr(running: dict[str, str]) -> None:
    assert "ck_local" not in repr(find_endpoint(env=running))


@pytest.mark.parametrize(
    "bad", ["ftp://x", "http://", "http://x:99999", "http://x:0", "http://u:p@x:1", "://", "http://[::1"]
)
def test_what_is_no_url_is_refused(bad: str) -> None:
    with pytest.raises(Invalid):
        check_url(bad)


def test_a_bare_host_is_taken_as_http() -> None:
    assert check_url("fleet:8080/") == "http://fleet:8080"


@pytest.mark.parametrize("given", ["http://fleet:8080/v1", "http://fleet:8080/v1/", "fleet:8080//v1//"])
def test_the_base_url_of_openais_clients_is_the_same_fleet(given: str) -> None:
    assert check_url(given) == "http://fleet:8080"


def test_a_fleet_of_this_machine_is_known_by_its_folder(running: dict[str, str], tmp_path: Path) -> None:
    assert find_endpoint(env=running).data == str(tmp_path)
    assert find_endpoint(url="https://localhost:8080/v1", env=running).data == str(tmp_path)
    assert find_endpoint(url="https://elsewhere:8080", key="ck_other", env=running).data == ""


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("http://127.0.0.1:80", "http://localhost:80", True),
        ("http://127.0.0.1:80", "https://127.0.0.1:80", False),
        ("http://127.0.0.1:80", "http://127.0.0.1:81", False),
        ("http://127.0.0.1:80", "http://10.0.0.1:80", False),
    ],
)
def test_same_place(one: str, other: str, same: bool) -> None:
    assert same_place(one, other) is same


@pytest.mark.parametrize("content", [b"", b"{", b"null", b"[]", b'{"url":""}', b"\xff\xfe", b'{"url":5}'])
def test_a_damaged_local_file_is_as_good_as_none(env: dict[str, str], content: bytes) -> None:
    path = local_file(env)
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    assert read_local(path) is None


def test_the_local_file_is_plain_json(running: dict[str, str]) -> None:
    assert json.loads(local_file(running).read_text())["url"] == "https://127.0.0.1:8080"


def test_config_folder_follows_the_usual_variables(tmp_path: Path) -> None:
    assert local_file({"HOME": "/home/x"}) == Path("/home/x/.config/corral/local.json")
    assert local_file({"HOME": "/home/x", "XDG_CONFIG_HOME": "/c"}) == Path("/c/corral/local.json")
