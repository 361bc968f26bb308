"""Corral and its dependencies for machines that join: the routes of a real controller behind a real gateway."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from corral import __version__
from corral.controller.distribution.own_wheel import pack_own_wheel
from corral.gallery.pypi.pip import own_platform, own_python
from tests.support.cluster import Cluster
from tests.support.fleet import Answer, http
from tests.support.waiting import wait_for


def get(cluster: Cluster, path: str, key: str = "") -> Answer:
    return http("GET", cluster.members[0].url + path, key=key)


def make_token(cluster: Cluster, **asked: Any) -> dict[str, Any]:
    answer = http("POST", cluster.members[0].url + "/api/tokens", key=cluster.key, body=asked)
    assert answer.status == 201, answer.body
    return dict(answer.json())


def uses_left(cluster: Cluster, token_id: str) -> int:
    (found,) = (row for row in get(cluster, "/api/tokens", cluster.key).json() if row["id"] == token_id)
    return int(found["uses_left"])


def test_the_installer_needs_no_login_and_is_the_one_of_the_join_line(cluster: Cluster) -> None:
    served = get(cluster, "/install.sh")
    assert served.status == 200
    command = make_token(cluster)["install_command"]
    assert hashlib.sha256(served.body).hexdigest() in command
    assert f"u={cluster.members[0].url};" in command
    assert f"VERSION='{__version__}'" in served.body.decode()
    assert pack_own_wheel().sha256 in served.body.decode()


def test_only_a_join_token_opens_the_wheels_and_looking_does_not_use_it_up(cluster: Cluster) -> None:
    own = f"/install/wheels/{pack_own_wheel().sha256}"
    made = make_token(cluster)
    for path in (own, "/install/wheels?platform=linux/amd64&python=3.12"):
        for key in ("", cluster.key, "cj_" + "a" * 52):
            assert get(cluster, path, key).status == 401, (path, key)
    wheel = get(cluster, own, made["secret"])
    assert hashlib.sha256(wheel.body).hexdigest() == pack_own_wheel().sha256
    assert uses_left(cluster, made["token"]["id"]) == 1
    http("DELETE", f"{cluster.members[0].url}/api/tokens/{made['token']['id']}", key=cluster.key)
    refused = get(cluster, own, made["secret"])
    assert refused.status == 401
    assert "was revoked" in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "status", "sentence"),
    [
        ("/install/wheels/" + "0" * 64, 404, "this is no package of Corral"),
        ("/install/wheels/..%2fcorral.db", 404, ""),
        ("/install/wheels/ABC", 400, "sha256"),
        ("/install/wheels?platform=windows/amd64&python=3.12", 400, "platform is one of linux/amd64"),
        ("/install/wheels?platform=linux/amd64&python=2.7", 400, "python a version such as 3.12"),
        ("/install/wheels?platform=linux/amd64", 400, "python"),
    ],
)
def test_bad_requests_are_explained(cluster: Cluster, path: str, status: int, sentence: str) -> None:
    answer = get(cluster, path, make_token(cluster)["secret"])
    assert (answer.status, sentence in answer.body.decode()) == (status, True), answer.body


@pytest.mark.parametrize("url", ["ftp://fleet", "https://fleet/path", "http://fleet'; id #", "http://a b"])
def test_an_address_that_is_none_cannot_get_into_the_command(cluster: Cluster, url: str) -> None:
    answer = http("POST", cluster.members[0].url + "/api/tokens", key=cluster.key, body={"url": url})
    assert answer.status == 400
    assert "url is http://" in answer.json()["error"]["message"]


@pytest.mark.timeout(180)
def test_the_wheels_for_a_machine_like_this_one_are_served_and_a_restart_forgets_none(cluster: Cluster) -> None:
    secret = make_token(cluster)["secret"]
    path = f"/install/wheels?platform={own_platform()}&python={own_python()}"

    def is_listed() -> bool:
        answer = get(cluster, path, secret)
        assert answer.status == 200, answer.body
        return bool(answer.json()["ready"])

    wait_for(is_listed, "list of packages", timeout_s=150)
    wheels = {wheel["name"]: wheel["sha256"] for wheel in get(cluster, path, secret).json()["wheels"]}
    assert {"pip", "uvloop", "grpcio"} <= {name.split("-")[0] for name in wheels}
    name, sha256 = next(item for item in wheels.items() if item[0].startswith("pip-"))
    assert hashlib.sha256(get(cluster, f"/install/wheels/{sha256}", secret).body).hexdigest() == sha256, name
    member = cluster.members[0]
    assert member.controller is not None
    member.controller.kill()
    cluster.start_controller(member)
    cluster.wait_ready(member)
    assert hashlib.sha256(get(cluster, f"/install/wheels/{sha256}", secret).body).hexdigest() == sha256


def test_the_list_is_a_file_that_names_the_release(cluster: Cluster) -> None:
    (stored,) = Path(cluster.root).rglob(f"{pack_own_wheel().sha256[:16]}-*.json")
    assert "wheels" in json.loads(stored.read_bytes())
