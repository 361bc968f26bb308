"""Upgrades: version, digest, drift by majority (docs/reference/wire/gallery.md#upgrades)."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from corral.contract.codec import encode
from corral.contract.messages.backends import NodeBackend, UpgradeInfo
from corral.gallery.backends.catalogue import BackendCatalogue
from corral.gallery.backends.entries import read_index
from corral.gallery.backends.resolution import Machine
from corral.gallery.backends.upgrades import AvailableBuild, NodeInventory, digests_to_look_up, is_proven, upgrades
from corral.gallery.galleries import Gallery

INDEX = """
- {name: imaged, uri: "oci://r.example/a:latest"}
- {name: versioned, uri: "oci://r.example/b:latest", version: "2"}
- {name: imaged-development, uri: "oci://r.example/a:dev"}
- {name: wheels, uri: "pypi://wheels"}
- {name: meta, capabilities: {default: imaged}}
"""
OTHER = """
- {name: imaged, uri: "oci://r.example/other:latest"}
"""
CATALOGUE = BackendCatalogue(
    [read_index(Gallery("g", "https://g"), INDEX.encode()), read_index(Gallery("h", "https://h"), OTHER.encode())]
)
NOW = {("g@imaged", ""): AvailableBuild("sha256:new")}
AMD = Machine("default", "linux/amd64", "3.11")
ARM = Machine("default", "linux/arm64", "3.11")


def node(number: int, *backends: NodeBackend, machine: Machine = AMD) -> NodeInventory:
    return NodeInventory(f"id{number}", f"n{number}", machine, backends)


def row(name: str = "imaged", digest: str = "", version: str = "", **more: object) -> NodeBackend:
    return NodeBackend(name=name, digest=digest, version=version, **more)  # type: ignore[arg-type]


def names(*nodes: NodeInventory, digests: dict[tuple[str, str], AvailableBuild] | None = None) -> list[str]:
    return list(upgrades(nodes, CATALOGUE, NOW if digests is None else digests))


def test_a_new_digest_is_an_upgrade() -> None:
    found = upgrades([node(1, row(digest="sha256:old"))], CATALOGUE, NOW)
    assert found == {"imaged": UpgradeInfo("imaged", "", "", "sha256:old", "sha256:new")}
    assert encode(found) == (
        b'{"imaged":{"backend_name":"imaged","installed_version":"","available_version":"",'
        b'"installed_digest":"sha256:old","available_digest":"sha256:new"}}'
    )


def test_the_same_digest_is_none() -> None:
    assert names(node(1, row(digest="sha256:new"))) == []


def test_a_digest_nobody_recorded_counts_as_old() -> None:
    assert names(node(1, row())) == ["imaged"]


def test_a_registry_that_does_not_answer_is_no_news() -> None:
    assert names(node(1, row(digest="sha256:old")), digests={}) == []


@pytest.mark.parametrize(("installed", "expected"), [("1", True), ("2", False), ("3", True), ("", True)])
def test_versions_decide_where_the_gallery_has_one(installed: str, expected: bool) -> None:
    digests = {("g@versioned", ""): AvailableBuild("sha256:new")}
    found = names(node(1, row("versioned", "sha256:old", installed)), digests=digests)
    assert found == (["versioned"] if expected else [])


def test_an_installed_version_alone_does_not_decide() -> None:
    assert names(node(1, row(digest="sha256:new", version="7"))) == []
    assert names(node(1, row(digest="sha256:old", version="7"))) == ["imaged"]


@pytest.mark.parametrize(
    "skipped",
    [
        row(digest="sha256:old", is_system=True),
        row("meta", version="1", is_meta=True),
        row("meta", version="1"),
        row("unheard-of", "sha256:old"),
        row(digest="sha256:old", uri="oci://r.example/my-own:1"),
    ],
)
def test_rows_that_are_left_alone(skipped: NodeBackend) -> None:
    assert names(node(1, skipped)) == []


def test_the_release_is_left_alone_where_its_development_build_is() -> None:
    dev = row("imaged-development", "sha256:dev")
    digests = {**NOW, ("g@imaged-development", ""): AvailableBuild("sha256:dev")}
    assert names(node(1, row(digest="sha256:old"), dev), digests=digests) == []
    assert names(node(1, row(digest="sha256:old"), dev), node(2, row(digest="sha256:old")), digests=digests) == [
        "imaged"
    ]
    dropped = upgrades([node(1, row(digest="sha256:old"), dev)], CATALOGUE, digests, development_suffix="nightly")
    assert list(dropped) == ["imaged"]


def test_a_row_is_compared_with_the_gallery_it_came_from() -> None:
    digests = {**NOW, ("h@imaged", ""): AvailableBuild("sha256:theirs")}
    theirs = row(digest="sha256:theirs", gallery_url="https://h")
    assert names(node(1, theirs), digests=digests) == []
    assert names(node(1, row(digest="sha256:theirs", gallery_url="https://g")), digests=digests) == ["imaged"]


def test_a_uri_of_ones_own_is_compared_when_it_is_the_gallerys() -> None:
    assert names(node(1, row(digest="sha256:old", uri="oci://r.example/a:latest"))) == ["imaged"]


def test_drift_names_the_outliers() -> None:
    fleet = [
        node(1, row(digest="sha256:new", version="2")),
        node(2, row(digest="sha256:old", version="1")),
        node(3, row(digest="sha256:new", version="2")),
        node(4),
    ]
    found = upgrades(fleet, CATALOGUE, NOW)
    assert encode(found["imaged"]) == (
        b'{"backend_name":"imaged","installed_version":"2","available_version":"","installed_digest":"sha256:new",'
        b'"available_digest":"sha256:new","node_drift":[{"node_id":"id2","node_name":"n2","version":"1",'
        b'"digest":"sha256:old"}]}'
    )


def test_drift_alone_is_an_upgrade_even_when_nobody_knows_the_newest() -> None:
    fleet = [node(1, row(digest="sha256:a")), node(2, row(digest="sha256:b")), node(3, row(digest="sha256:b"))]
    found = upgrades(fleet, CATALOGUE, {})
    assert found["imaged"].installed_digest == "sha256:b"
    assert [each.node_id for each in found["imaged"].node_drift] == ["id1"]


def test_in_a_tie_those_who_have_the_newest_are_not_the_outliers() -> None:
    fleet = [node(1, row(digest="sha256:zzz")), node(2, row(digest="sha256:new"))]
    found = upgrades(fleet, CATALOGUE, NOW)
    assert found["imaged"].installed_digest == "sha256:new"
    assert [each.node_id for each in found["imaged"].node_drift] == ["id1"]


def test_wheels_of_different_machines_are_no_drift() -> None:
    digests = {
        ("g@wheels", "linux/amd64 python3.11"): AvailableBuild("sha256:amd", "1.1"),
        ("g@wheels", "linux/arm64 python3.11"): AvailableBuild("sha256:arm", "1.1"),
    }
    fleet = [node(1, row("wheels", "sha256:amd", "1.1")), node(2, row("wheels", "sha256:arm", "1.1"), machine=ARM)]
    assert names(*fleet, digests=digests) == []
    older = [*fleet, node(3, row("wheels", "sha256:was", "1.0"), machine=ARM)]
    found = upgrades(older, CATALOGUE, digests)
    assert [each.node_id for each in found["wheels"].node_drift] == ["id3"]
    assert found["wheels"].available_version == "1.1"


def test_what_must_be_looked_up() -> None:
    fleet = [
        node(1, row(), row("versioned"), row("wheels"), row("meta")),
        node(2, row(), row("wheels"), machine=ARM),
        node(3, row(), row("wheels")),
    ]
    needed = digests_to_look_up(fleet, CATALOGUE)
    assert sorted(needed) == [
        ("g@imaged", ""),
        ("g@wheels", "linux/amd64 python3.11"),
        ("g@wheels", "linux/arm64 python3.11"),
    ]
    entry, machine = needed["g@wheels", "linux/arm64 python3.11"]
    assert (entry.name, machine) == ("wheels", ARM)


FLEETS = st.lists(
    st.tuples(st.sampled_from(["", "1", "2"]), st.sampled_from(["", "sha256:a", "sha256:new"])), min_size=1, max_size=7
)


@given(FLEETS, st.booleans())
def test_the_fleet_is_left_alone_exactly_when_all_have_the_newest(fleet: list[tuple[str, str]], known: bool) -> None:
    inventories = [node(number, row(digest=digest, version=version)) for number, (version, digest) in enumerate(fleet)]
    found = upgrades(inventories, CATALOGUE, NOW if known else {})
    uniform = len(set(fleet)) == 1
    newest = all(digest == "sha256:new" for _, digest in fleet)
    assert ("imaged" not in found) == (uniform and (newest or not known))
    if "imaged" in found:
        info = found["imaged"]
        majority = (info.installed_version, info.installed_digest)
        counted = Counter(fleet)
        assert counted[majority] == max(counted.values())
        assert len(info.node_drift) == len(fleet) - counted[majority]
        assert all((each.version, each.digest) != majority for each in info.node_drift)


@given(FLEETS)
def test_the_order_of_nodes_makes_no_difference(fleet: list[tuple[str, str]]) -> None:
    nodes = [node(number, row(digest=digest, version=version)) for number, (version, digest) in enumerate(fleet)]
    assert upgrades(nodes, CATALOGUE, NOW) == upgrades(nodes[::-1], CATALOGUE, NOW)


@pytest.mark.parametrize(
    ("fleet", "listed", "proven"),
    [
        ([("2", "sha256:a"), ("2", "sha256:a"), ("2", "")], True, False),
        ([("2", ""), ("2", ""), ("2", "sha256:a")], True, False),
        ([("2", ""), ("2", "")], False, False),
        ([("2", "sha256:a"), ("2", "sha256:a"), ("1", "")], True, True),
        ([("2", "sha256:a"), ("2", "sha256:a"), ("2", "sha256:b")], True, True),
        ([("1", ""), ("1", "")], True, True),
        ([("", ""), ("", "")], True, False),
        ([("", "sha256:old")], True, True),
    ],
)
def test_a_digest_that_is_not_reported_is_listed_and_proves_nothing(
    fleet: list[tuple[str, str]], listed: bool, proven: bool
) -> None:
    rows = [node(number, row("versioned", digest, version)) for number, (version, digest) in enumerate(fleet)]
    found = upgrades(rows, CATALOGUE, NOW)
    assert (list(found), [is_proven(info) for info in found.values()]) == (
        ["versioned"] if listed else [],
        [proven] if listed else [],
    )


@pytest.mark.parametrize(
    ("digests", "proven"),
    [(["sha256:old"], True), ([""], False), (["", ""], False), (["sha256:new", ""], False), (["sha256:old", ""], True)],
)
def test_without_versions_the_digests_that_are_reported_prove_it(digests: list[str], proven: bool) -> None:
    [info] = upgrades([node(number, row(digest=each)) for number, each in enumerate(digests)], CATALOGUE, NOW).values()
    assert is_proven(info) == proven


def test_wheels_of_one_machine_that_are_old_are_told_before_a_digest_that_is_missing() -> None:
    now = {
        ("g@wheels", AMD.runtime): AvailableBuild("sha256:a", "2"),
        ("g@wheels", ARM.runtime): AvailableBuild("sha256:b", "2"),
    }
    amd = [node(1, row("wheels", "sha256:a", "2")), node(2, row("wheels", "", "2"))]
    arm = node(3, row("wheels", "sha256:old", "1"), machine=ARM)
    found = upgrades([*amd, arm], CATALOGUE, now)["wheels"]
    assert is_proven(found)
    assert not is_proven(upgrades(amd, CATALOGUE, now)["wheels"])
