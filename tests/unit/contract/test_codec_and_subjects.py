"""The wire, in its own literal words."""

from __future__ import annotations

import contextlib
import importlib
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import corral
from corral.contract import codec
from corral.contract.messages import backends, blobs, files, hints, models, nodes, releases, replicas, staging
from corral.contract.subjects import Call, Event, Subject, sanitise


@pytest.mark.parametrize("payload", [b"", b"null", b"{}"])
def test_empty_null_and_braces_mean_the_same(payload: bytes) -> None:
    assert codec.decode(backends.StopBackend, payload) == backends.StopBackend()


def test_unknown_fields_are_ignored_and_absent_ones_are_zero() -> None:
    reply = codec.decode(backends.InstallReply, b'{"success":true,"from_the_future":[1,{"a":null}]}')
    assert reply == backends.InstallReply(success=True)


def test_null_arrays_are_empty() -> None:
    assert codec.decode(backends.BackendList, b'{"backends":null}').backends == ()
    assert codec.decode(files.DirListing, b'{"files":null,"error":null}').files == ()
    assert codec.decode(models.RunningModels, b'{"models":[{"model_id":"m","replica_index":null}]}').models == (
        models.RunningModel(model_id="m"),
    )


@pytest.mark.parametrize("payload", [b"{", b"[]", b'"x"', b"3", b'{"success":"yes"}', b"\xff\xfe", b"[" * 100_000])
def test_what_cannot_be_read_is_told(payload: bytes) -> None:
    with pytest.raises(codec.Undecodable):
        codec.decode(backends.InstallReply, payload)


@given(st.binary(max_size=200))
def test_no_payload_raises_anything_else(payload: bytes) -> None:
    with contextlib.suppress(codec.Undecodable):
        codec.decode(nodes.RegisterNode, payload)


def test_omitted_and_always_present_fields_are_as_the_contract_has_them() -> None:
    assert codec.encode(backends.InstallBackend(backend="vllm")) == b'{"backend":"vllm"}'
    assert codec.encode(backends.InstallReply()) == b'{"success":false}'
    assert (
        codec.encode(models.ModelStopped(terminated=True, process_key="m#0"))
        == b'{"matched":false,"freed":false,"terminated":true,"process_key":"m#0"}'
    )
    assert codec.encode(models.RunningModels()) == b'{"models":[]}'
    assert (
        codec.encode(backends.InstallProgress(op_id="o", node_id="n", backend="b", phase="downloading"))
        == b'{"op_id":"o","node_id":"n","backend":"b","percentage":0.0,"phase":"downloading"}'
    )
    assert codec.encode(backends.NodeBackend(name="x")) == b'{"name":"x","is_system":false,"is_meta":false}'


@pytest.mark.parametrize(
    ("token", "safe"), [("a.b", "a-b"), ("a*>b", "a--b"), ("a b\tc\nd", "a-b-c-d"), ("Ünï#1\r", "Ünï#1\r"), ("", "")]
)
def test_sanitising(token: str, safe: str) -> None:
    assert sanitise(token) == safe


SUBJECTS = [
    (backends.INSTALL_BACKEND.subject, "nodes.{node}.backend.install"),
    (backends.UPGRADE_BACKEND.subject, "nodes.{node}.backend.upgrade"),
    (backends.LIST_BACKENDS.subject, "nodes.{node}.backend.list"),
    (backends.DELETE_BACKEND.subject, "nodes.{node}.backend.delete"),
    (backends.STOP_BACKEND.subject, "nodes.{node}.backend.stop"),
    (backends.INSTALL_PROGRESS.subject, "nodes.{node}.backend.install.{op}.progress"),
    (backends.CANCEL_BACKEND.subject, "nodes.{node}.backend.cancel"),
    (backends.VERIFY_BACKEND.subject, "nodes.{node}.backend.verify"),
    (backends.INSTALL_RESULT.subject, "nodes.{node}.backend.install.{op}.result"),
    (backends.UPGRADE_RESULT.subject, "nodes.{node}.backend.upgrade.{op}.result"),
    (backends.DELETE_RESULT.subject, "nodes.{node}.backend.delete.{op}.result"),
    (models.UNLOAD_MODEL.subject, "nodes.{node}.model.unload"),
    (models.STOP_MODEL.subject, "nodes.{node}.model.stop"),
    (models.DELETE_MODEL.subject, "nodes.{node}.model.delete"),
    (models.LIST_RUNNING_MODELS.subject, "nodes.{node}.models.running"),
    (models.KEEP_MODELS.subject, "nodes.{node}.models.keep"),
    (blobs.REVOKE_BLOB_TOKENS.subject, "nodes.{node}.blobs.revoke"),
    (staging.STAGE_MODEL.subject, "nodes.{node}.model.stage"),
    (staging.CANCEL_STAGE.subject, "nodes.{node}.model.stage.cancel"),
    (staging.STAGE_PROGRESS.subject, "nodes.{node}.model.stage.{op}.progress"),
    (staging.STAGE_RESULT.subject, "nodes.{node}.model.stage.{op}.result"),
    (staging.LIST_FILES.subject, "nodes.{node}.models.files"),
    (releases.UPGRADE_WORKER.subject, "nodes.{node}.corral.upgrade"),
    (releases.CANCEL_UPGRADE.subject, "nodes.{node}.corral.upgrade.cancel"),
    (staging.COLLECT_FILES.subject, "nodes.{node}.models.collect"),
    (replicas.START_REPLICA_PROGRESS.subject, "nodes.{node}.replica.start.{op}.progress"),
    (nodes.STOP_NODE.subject, "nodes.{node}.stop"),
    (nodes.NODE_HEARTBEAT.subject, "nodes.{node}.heartbeat"),
    (replicas.NODE_LOAD.subject, "nodes.{node}.load"),
    (files.ENSURE_FILE.subject, "nodes.{node}.files.ensure"),
    (files.STAGE_FILE.subject, "nodes.{node}.files.stage"),
    (files.TEMP_FILE.subject, "nodes.{node}.files.temp"),
    (files.LIST_DIR.subject, "nodes.{node}.files.listdir"),
    (hints.VIEW_CHANGED.subject, "corral.view.changed"),
    (hints.WORK_CHANGED.subject, "corral.work.changed"),
    (hints.PEER_LOAD.subject, "corral.peers.load"),
    (hints.GATEWAY_DEMAND.subject, "corral.gateways.demand"),
    (hints.RUNNING_WANTED.subject, "corral.view.running"),
    (hints.GATEWAY_RUNNING.subject, "corral.gateways.running"),
    (replicas.START_REPLICA.subject, "nodes.{node}.replica.start"),
    (replicas.STOP_REPLICA.subject, "nodes.{node}.replica.stop"),
    (replicas.START_REPLICA_RESULT.subject, "nodes.{node}.replica.start.{op}.result"),
    (replicas.STOP_REPLICA_RESULT.subject, "nodes.{node}.replica.stop.{op}.result"),
]


@pytest.mark.parametrize(("subject", "template"), SUBJECTS)
def test_subjects_are_the_contracts(subject: Subject, template: str) -> None:
    assert subject.template == template


def test_every_subject_that_is_declared_is_listed_here() -> None:
    """Found in the modules themselves, wherever in the package they are: a subject nobody compares with the contract
    may be changed by accident."""
    root = Path(corral.__path__[0])
    declared = set()
    for path in root.rglob("*.py"):
        if re.search(r"^\w+ = (call|event)\(", path.read_text(), re.MULTILINE):
            name = ".".join(("corral", *path.relative_to(root).with_suffix("").parts))
            for value in vars(importlib.import_module(name)).values():
                if isinstance(value, Call | Event):
                    declared.add(value.subject.template)
    assert declared == {template for _, template in SUBJECTS}
    assert len(SUBJECTS) == len(declared)


def test_a_subject_is_filled_matched_and_read() -> None:
    subject = Subject("nodes.{node}.backend.install.{op}.progress")
    assert subject.fill(node="a.b", op="1") == "nodes.a-b.backend.install.1.progress"
    assert subject.match_all(node="n") == "nodes.n.backend.install.*.progress"
    assert subject.match_all() == "nodes.*.backend.install.*.progress"
    assert subject.read("nodes.n1.backend.install.o1.progress") == {"node": "n1", "op": "o1"}


def test_an_empty_token_is_refused() -> None:
    with pytest.raises(ValueError, match="empty token 'node'"):
        Subject("nodes.{node}.stop").fill(node="")


def test_a_heartbeat_tells_inventory_and_orders() -> None:
    told = codec.decode(
        nodes.BusHeartbeat,
        b"""{"boot_id":"b","inventory":[{"name":"vllm","is_system":false,"is_meta":false,"digest":"sha256:x"}],
             "orders":[{"op_id":"o","attempt":2,"kind":"install","backend":"vllm"},
                       {"op_id":"p","attempt":1,"kind":"delete","backend":"x","result":{"op_id":"p","success":true}}]}""",
    )
    assert told.inventory is not None
    assert told.inventory[0].digest == "sha256:x"
    assert told.orders is not None
    assert [order.result and order.result.success for order in told.orders] == [None, True]
    assert codec.decode(nodes.BusHeartbeat, b"{}").inventory is None, "not told is not the same as nothing there"
    assert b"inventory" in codec.encode(nodes.BusHeartbeat(inventory=()))


def test_status_words_are_the_contracts() -> None:
    assert [status.value for status in nodes.NodeStatus] == ["pending", "healthy", "unhealthy", "offline", "draining"]
    assert [s.value for s in backends.NodeRowStatus] == [
        "queued",
        "downloading",
        "running_on_worker",
        "success",
        "error",
    ]
    assert [p.value for p in backends.Phase] == ["resolving", "downloading", "verifying", "extracting", "starting"]
