"""`migrate_store`: everything arrives, or nothing does."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from sqlalchemy import BigInteger, Column, MetaData, Table, Text

from corral.contract.hardware import Device
from corral.contract.view import KeyLimits
from corral.kit.errors import Conflict, Failed, NotFound
from corral.store import Store, open_store
from corral.store.copy import CopyProgress, copy_store, migrate_store
from corral.store.engine import leases
from corral.store.records import DueSwitch
from corral.store.tables import (
    all_tables,
    api_keys,
    backend_intents,
    backend_rules,
    backend_targets,
    bus_credentials,
    cluster_secrets,
    controllers,
    due_switches,
    join_tokens,
    load_jobs,
    model_files,
    model_revisions,
    model_schedules,
    models,
    node_backends,
    node_events,
    node_files,
    node_labels,
    node_tombstones,
    nodes,
    operation_nodes,
    operations,
    peer_processes,
    process_peaks,
    receipts,
    release_keys,
    release_wheels,
    releases,
    replicas,
    revisions,
    rollouts,
    samples,
    settings_kv,
    web_sessions,
)
from corral.store.tables.api_keys import ApiKey
from corral.store.tables.join_tokens import JoinToken
from corral.store.tables.model_revisions import ModelRevision
from corral.store.tables.node_events import StatusChange
from corral.store.tables.process_peaks import Peak
from corral.store.tables.release_keys import ReleaseKey
from corral.store.tables.releases import Release
from corral.store.tables.samples import Sample, SampleBody
from corral.store.tables.web_sessions import WebSession
from tests.integration.store.rows import (
    NOON,
    a_file,
    a_job,
    a_model,
    a_node,
    a_peer_process,
    a_receipt,
    a_replica,
    a_rollout,
    a_rule,
    a_schedule,
    a_target,
    an_intent,
    an_inventory,
    an_op_row,
    an_operation,
    row_of,
)
from tests.support.postgres import Postgres

MANY = 23  # several batches of seven


@pytest.fixture(params=["sqlite", "postgresql"])
def target_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path}/target.db"
        return
    server: Postgres = request.getfixturevalue("postgres")
    url = server.new_database()
    yield url
    server.drop(url)


@pytest.fixture
async def target(target_url: str) -> AsyncIterator[Store]:
    async with open_store(target_url) as opened:
        yield opened


async def fill(store: Store) -> None:
    """Something in every table."""
    gpu = Device(index=0, vendor="nvidia", name="ümläut 🐎", total_bytes=24 << 30)
    async with store.write() as tx:
        now = await tx.now()
        for number in range(MANY):
            node = a_node(
                name=f"node {number}", devices=(gpu,) * (number % 3), ingress_ok=(None, True, False)[number % 3]
            )
            await nodes.insert(tx, node)
            await node_labels.merge(tx, node.id, {"a": "1", "ä": "2"}, origin="admin")
            await revisions.bump(tx, f"kind-{number}")
            await node_backends.put(tx, an_inventory(node.id))
            await node_files.seen(tx, [(node.id, "sha256:a"), (node.id, "sha256:b")])
            await peer_processes.put(tx, [a_peer_process(node.id, f"p{number}")])
            await backend_intents.put(tx, [an_intent(node.id, "vllm"), an_intent(node.id, "ümläut")])
            await due_switches.put(tx, [DueSwitch(node.id, "vllm", f"op{number}", NOON, ("ä",), {"ä": "too small"})])
            await backend_rules.insert(tx, a_rule(generation=number, excluded=(node.id,), withdrawn_at=NOON))
            await backend_targets.add(tx, [a_target(capability=f"c{number}")])
            await operations.insert(tx, an_operation(id=f"op{number}"))
            await rollouts.put(tx, a_rollout(f"op{number}", node.id))
            await receipts.insert(tx, [row_of(a_receipt(node_id=node.id, total_us=2**40))])
            await models.put(tx, a_model(f"model-{number}"))
            await replicas.put(tx, [a_replica(node.id, f"model-{number}")])
            await load_jobs.put(tx, [a_job(f"model-{number}")])
            await model_files.put(tx, a_file(f"model-{number}"))
            await process_peaks.put(
                tx, [Peak(model=f"model-{number}", revision="r1", process_id="p", seen_at=NOON, ram_bytes=2**40)]
            )
            await node_events.add(tx, StatusChange(node.id, NOON, "healthy", "it answers"))
            await model_revisions.add(
                tx,
                ModelRevision(model=f"model-{number}", row_version=1, at=NOON, revision="r1", definition={"name": "ä"}),
            )
            await samples.put(
                tx, [Sample("fleet", "", 60, at=NOON, source=f"c{number}", body=SampleBody(until_s=7.5, requests=3))]
            )
            await model_schedules.put(tx, a_schedule(f"model-{number}", min_prefix_match=0.1))
            await operation_nodes.put(tx, [an_op_row(operation_id=f"op{number}", node_id=node.id, percentage=0.1)])
        gone = a_node()
        await nodes.insert(tx, gone)
        await nodes.delete(tx, gone.id)
        await join_tokens.insert(
            tx, JoinToken(id="t", name="t", secret_hash="h", created_at=NOON, uses_left=None, expires_at=NOON)
        )
        limits = KeyLimits(requests_per_min=3)
        await api_keys.insert(
            tx,
            ApiKey(id="k", name="k", secret_hash="h", role="inference", created_at=NOON, models=("m",), limits=limits),
        )
        await web_sessions.insert(
            tx, WebSession(id_hash="s", key_id="k", csrf="c", created_at=NOON, expires_at=NOON, last_seen_at=NOON)
        )
        await leases.claim_lease(tx, "health", "me", 60)
        await release_keys.add(tx, ReleaseKey(number=1, public_key="k", proof="", created_at=NOON))
        await release_wheels.put(tx, "ab" * 32, bytes(range(256)))
        await releases.insert(
            tx, Release(counter=1, version="1", sha256="ab" * 32, size_bytes=256, signed="s", created_at=NOON)
        )
        await cluster_secrets.get_or_create(tx, "signing", lambda: "x" * 1000)
        await bus_credentials.revoke(tx, "U", "n", expires_at=now + timedelta(hours=1))
        await controllers.seen(tx, "c", host="h", version="1")
        await settings_kv.put(tx, "guard", {"since": 2**60, "text": "a\0b"})


async def sizes(store: Store) -> dict[str, int]:
    async with store.read() as tx:
        return {table.name: (await tx.fetch_all(f"SELECT count(*) FROM {table.name}"))[0][0] for table in all_tables()}


async def test_everything_arrives(store: Store, target: Store) -> None:
    await fill(store)
    seen: list[CopyProgress] = []
    copied = await copy_store(store, target, batch_rows=7, on_progress=seen.append)
    before = await sizes(store)
    assert min(before.values()) > 0, "a table nobody fills is a table nobody tests"
    assert await sizes(target) == before
    assert {row.table: row.rows for row in copied} == before
    assert [step.copied for step in seen if step.table == "nodes"] == [7, 14, 21, MANY]
    assert {step.total for step in seen if step.table == "nodes"} == {MANY}
    async with store.read() as here, target.read() as there:
        for read in (
            nodes.list_,
            node_labels.list_for,
            api_keys.list_,
            join_tokens.list_,
            leases.list_,
            load_jobs.list_,
            models.list_,
            model_files.list_,
            process_peaks.list_,
            model_schedules.list_,
            release_keys.list_,
            release_wheels.list_names,
            releases.list_,
            replicas.list_,
            rollouts.list_,
            revisions.read_all,
            backend_intents.list_,
            backend_rules.list_live,
            due_switches.list_,
            node_backends.list_,
            node_files.list_,
            peer_processes.list_,
            operations.list_open,
            operation_nodes.list_open,
        ):
            assert await read(here) == await read(there)
        assert await release_wheels.find(there, "ab" * 32) == bytes(range(256))
        assert await settings_kv.find(there, "guard", dict) == {"since": 2**60, "text": "a\0b"}
        assert await web_sessions.find(there, "s") == await web_sessions.find(here, "s")
        assert await node_tombstones.list_by_name(there, "node-1") == await node_tombstones.list_by_name(here, "node-1")


async def test_from_url_to_url(url: str, target_url: str) -> None:
    async with open_store(url) as store:
        await fill(store)
        expected = await sizes(store)
    copied = await migrate_store(url, target_url)
    assert {row.table: row.rows for row in copied} == expected
    assert len({row.digest for row in copied}) == len(copied)
    async with open_store(target_url) as store:
        assert await sizes(store) == expected
    with pytest.raises(Conflict, match="not empty"):
        await migrate_store(url, target_url)


async def test_a_source_that_is_not_there_is_not_made(tmp_path: Path) -> None:
    for _ in range(2):  # also not by having asked once
        with pytest.raises(NotFound, match=r"typo\.db"):
            await migrate_store(f"sqlite:///{tmp_path}/typo.db", f"sqlite:///{tmp_path}/target.db")


async def test_a_target_that_holds_anything_is_refused(store: Store, target: Store) -> None:
    await fill(store)
    async with target.write() as tx:
        await settings_kv.put(tx, "mine", 1)
    before = await sizes(target)
    with pytest.raises(Conflict, match="settings_kv has 1 rows"):
        await copy_store(store, target)
    assert await sizes(target) == before


async def test_a_failure_in_the_middle_leaves_the_target_empty(store: Store, target: Store) -> None:
    await fill(store)

    def fail_late(step: CopyProgress) -> None:
        if step.table == "nodes" and step.copied > 10:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await copy_store(store, target, batch_rows=7, on_progress=fail_late)
    assert set((await sizes(target)).values()) == {0}
    await copy_store(store, target)
    assert await sizes(target) == await sizes(store)


async def test_a_row_changed_on_the_way_is_noticed(store: Store, target: Store) -> None:
    await fill(store)
    async with target.write() as tx:
        if target.kind == "sqlite":
            await tx.execute(
                """CREATE TRIGGER spoil AFTER INSERT ON nodes WHEN NEW.name = 'node 5'
                   BEGIN UPDATE nodes SET total_ram = 1 WHERE id = NEW.id; END"""
            )
        else:
            await tx.execute(
                """CREATE FUNCTION spoil() RETURNS trigger LANGUAGE plpgsql AS
                   $$ BEGIN IF NEW.name = 'node 5' THEN NEW.total_ram = 1; END IF; RETURN NEW; END $$"""
            )
            await tx.execute("CREATE TRIGGER spoil BEFORE INSERT ON nodes FOR EACH ROW EXECUTE FUNCTION spoil()")
    with pytest.raises(Failed, match="nodes differs"):
        await copy_store(store, target)
    assert set((await sizes(target)).values()) == {0}


async def test_numbers_go_on_after_the_last(store: Store, target: Store) -> None:
    numbered = Table("numbered", MetaData(), Column("id", BigInteger, primary_key=True), Column("text", Text))
    for chosen in (store, target):
        kind = "INTEGER" if chosen.kind == "sqlite" else "BIGSERIAL"
        async with chosen.write() as tx:
            await tx.execute(f"CREATE TABLE numbered (id {kind} PRIMARY KEY, text TEXT)")
    async with store.write() as tx:
        for text in ("a", "b", "c"):
            await tx.execute("INSERT INTO numbered (text) VALUES (:text)", {"text": text})
    await copy_store(store, target, tables=[numbered])
    async with target.write() as tx:
        await tx.execute("INSERT INTO numbered (text) VALUES ('d')")
        assert await tx.fetch_all("SELECT id FROM numbered WHERE text = 'd'") == [(4,)]
