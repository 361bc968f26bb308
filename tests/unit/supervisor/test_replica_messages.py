"""replica.start, replica.stop and what runs, in the wire's own words."""

from __future__ import annotations

from corral.contract import codec
from corral.contract.messages import replicas


def test_subjects() -> None:
    assert replicas.START_REPLICA.subject.fill(node="n1") == "nodes.n1.replica.start"
    assert replicas.STOP_REPLICA.subject.fill(node="n1") == "nodes.n1.replica.stop"
    assert replicas.START_REPLICA_RESULT.subject.fill(node="n1", op="o.1") == "nodes.n1.replica.start.o-1.result"
    assert replicas.STOP_REPLICA_RESULT.subject.match_all(node="n1") == "nodes.n1.replica.stop.*.result"


def test_a_start_on_the_wire() -> None:
    order = replicas.StartReplica(
        op_id="o",
        attempt=2,
        process_id="p",
        model="qwen",
        replica=1,
        backend="llama-cpp",
        revision="r7",
        digest="sha256:d",
        protocol="openai",
        definition={"context_size": 4096},
        files=(replicas.ReplicaFile(path="qwen.gguf", digest="sha256:f", size_bytes=9),),
        devices=(replicas.ReplicaDevice(vendor="nvidia", index=0, uuid="GPU-1"),),
        memory_bytes=10,
        accept=True,
    )
    wire = (
        b'{"op_id":"o","attempt":2,"process_id":"p","model":"qwen","replica":1,"backend":"llama-cpp","revision":"r7",'
        b'"digest":"sha256:d","protocol":"openai","definition":{"context_size":4096},'
        b'"files":[{"path":"qwen.gguf","digest":"sha256:f","size_bytes":9}],'
        b'"devices":[{"vendor":"nvidia","index":0,"uuid":"GPU-1"}],"memory_bytes":10,"accept":true}'
    )
    assert codec.encode(order) == wire
    assert codec.decode(replicas.StartReplica, wire) == order


def test_a_stop_and_its_answers_on_the_wire() -> None:
    stop = codec.decode(replicas.StopReplica, b'{"process_id":"p","grace_s":5}')
    assert stop == replicas.StopReplica(process_id="p", grace_s=5.0)
    assert codec.encode(replicas.ReplicaReply(success=True, accepted=True)) == b'{"success":true,"accepted":true}'
    assert (
        codec.encode(replicas.ReplicaResult(op_id="o", attempt=1, success=False, process_id="p", error="no"))
        == b'{"op_id":"o","attempt":1,"success":false,"process_id":"p","error":"no"}'
    )


def test_what_runs_on_the_wire() -> None:
    row = replicas.ReplicaProcess(
        process_id="p", model="m", replica=0, backend="mock", state=replicas.ReplicaState.READY.value, protocol="grpc"
    )
    assert codec.encode(row) == (
        b'{"process_id":"p","model":"m","replica":0,"backend":"mock","state":"ready","protocol":"grpc"}'
    )
    assert [state.value for state in replicas.ReplicaState] == ["starting", "ready", "stopping", "restarting", "failed"]
