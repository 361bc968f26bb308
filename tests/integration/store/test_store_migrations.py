"""The schema: made, upgraded with data in it, by several at once, refused when newer."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import Connection, create_engine
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.pool import NullPool

from corral import __version__
from corral.kit.errors import Invalid, Unavailable
from corral.store import Store, StoreOptions, open_store
from corral.store.engine.migrate import SCRIPTS, VERSION_TABLE, head_of, revision_of
from corral.store.engine.schema import metadata
from corral.store.engine.schema_floor import SchemaFloor, read_floor, refuse_wheel
from corral.store.tables import node_labels, nodes
from tests.integration.store import processes
from tests.integration.store.rows import a_node

BEFORE = '''
"""Before: nodes have a zone."""
import sqlalchemy as sa
from alembic import op

revision = "0901"
down_revision = "{head}"

def upgrade() -> None:
    op.add_column("nodes", sa.Column("zone", sa.Text, nullable=False, server_default="here"))
    op.create_table("zones", sa.Column("name", sa.Text, primary_key=True))
    op.execute("INSERT INTO zones SELECT DISTINCT zone FROM nodes")
    {then}
'''
AFTER = '''
"""After: nobody reads the capability any more."""
import sqlalchemy as sa
from alembic import op

revision = "0902"
down_revision = "0901"

def upgrade() -> None:
    with op.batch_alter_table("nodes") as nodes:
        nodes.drop_column("capability")
'''


def with_steps(tmp_path: Path, **steps: str) -> Path:
    """Our scripts, and these."""
    scripts = tmp_path / "later"
    shutil.rmtree(scripts, ignore_errors=True)
    shutil.copytree(SCRIPTS, scripts, ignore=shutil.ignore_patterns("__pycache__"))
    for name, text in steps.items():
        (scripts / "versions" / f"{name.lstrip('_')}.py").write_text(text)
    return scripts


def later(tmp_path: Path) -> Path:
    before = BEFORE.format(head=head_of(), then="")
    return with_steps(tmp_path, _0901_before_zones=before, _0902_after_zones=AFTER)


async def revision(store: Store) -> str | None:
    async with store.read() as tx:
        return await revision_of(tx)


async def fetched(store: Store, sql: str) -> list[tuple[Any, ...]]:
    async with store.read() as tx:
        return await tx.fetch_all(sql)


async def test_an_empty_database_gets_the_schema(empty_url: str) -> None:
    async with open_store(empty_url) as store:
        assert await revision(store) == head_of()
        async with store.write() as tx:
            await nodes.insert(tx, a_node())
    async with open_store(empty_url) as store, store.read() as tx:
        assert len(await nodes.list_(tx)) == 1


async def test_the_database_has_what_the_tables_say(url: str, kind: str, tmp_path: Path) -> None:
    def differences(connection: Connection) -> list[Any]:
        known = {"version_table": VERSION_TABLE, "compare_type": True, "compare_server_default": True}
        return list(compare_metadata(MigrationContext.configure(connection, opts=known), metadata))

    if kind == "sqlite":
        engine = create_engine(f"sqlite:///{tmp_path}/corral.db", poolclass=NullPool)
        with engine.connect() as connection:
            assert differences(connection) == []
    else:
        async_engine = create_async_engine(url.replace("postgresql:", "postgresql+asyncpg:"), poolclass=NullPool)
        async with async_engine.connect() as opened:
            assert await opened.run_sync(differences) == []


async def test_several_processes_at_once_on_an_empty_database(empty_url: str) -> None:
    starters = [processes.start("open_only", empty_url) for _ in range(3)]
    for starter in starters:
        await asyncio.to_thread(processes.finish, starter)
    async with open_store(empty_url) as store:
        assert await revision(store) == head_of()


async def test_opening_what_is_up_to_date_imports_no_alembic(url: str) -> None:
    said = await asyncio.to_thread(processes.finish, processes.start("open_only", url))
    assert said == ""


async def test_an_older_database_is_upgraded_with_its_data(url: str, tmp_path: Path) -> None:
    node = a_node(name="barn", capability="metal")
    async with open_store(url) as store, store.write() as tx:
        await nodes.insert(tx, node)
        await node_labels.merge(tx, node.id, {"tier": "fast"}, origin="admin")
    async with open_store(url, scripts=later(tmp_path)) as store:
        assert await revision(store) == "0902"
        assert await fetched(store, "SELECT name, zone FROM nodes") == [("barn", "here")]
        assert await fetched(store, "SELECT name FROM zones") == [("here",)]
        assert await fetched(store, "SELECT key, value FROM node_labels") == [("tier", "fast")]
        with pytest.raises(Exception, match="capability"):
            await fetched(store, "SELECT capability FROM nodes")


async def test_foreign_keys_still_hold_after_a_table_was_rebuilt(url: str, tmp_path: Path) -> None:
    node = a_node()
    async with open_store(url) as store, store.write() as tx:
        await nodes.insert(tx, node)
        await node_labels.merge(tx, node.id, {"tier": "fast"}, origin="admin")
    async with open_store(url, scripts=later(tmp_path)) as store:
        async with store.write() as tx:
            await tx.execute("DELETE FROM nodes")
        assert await fetched(store, "SELECT * FROM node_labels") == []


async def test_a_newer_database_is_refused_in_one_line(url: str, tmp_path: Path) -> None:
    async with open_store(url, scripts=later(tmp_path)):
        pass
    with pytest.raises(Invalid) as caught:
        async with open_store(url):
            pass
    assert str(caught.value) == (
        f"the database has schema 0902, newer than this corral ({head_of()}): upgrade corral; corral {__version__} has "
        "removed what it needs, with the *after* migration 0902 (nobody reads the capability any more)"
    )


async def test_the_release_before_starts_again_until_an_after_migration(url: str, tmp_path: Path) -> None:
    before = BEFORE.format(head=head_of(), then="")
    first = with_steps(tmp_path / "first", _0901_before_zones=before)
    async with open_store(url, scripts=first) as store, store.write() as tx:
        await nodes.insert(tx, a_node(name="attic"))
    async with open_store(url) as store:
        assert await revision(store) == "0901"
        async with store.write() as tx:
            await nodes.insert(tx, a_node(name="barn"))
    kept = AFTER.replace('revision = "0902"', 'revision = "0902"\noldest_schema = "0901"')
    both = with_steps(tmp_path / "both", _0901_before_zones=before, _0902_after_zones=kept)
    async with open_store(url, scripts=both) as store, store.read() as tx:
        floor = await read_floor(tx)
    assert floor == SchemaFloor("0901", __version__, "0902 (nobody reads the capability any more)")
    async with open_store(url, scripts=first) as store:
        assert await revision(store) == "0902", "the migration says that this one still works"
    with pytest.raises(Invalid, match="has removed what it needs"):
        async with open_store(url):
            pass


def test_a_wheel_that_could_not_use_the_database_is_refused() -> None:
    floor = SchemaFloor("0024", "1.3.0", "0025 (drop zones)")
    refuse_wheel("1.2.0", "0024", floor)
    refuse_wheel("1.2.0", "", floor)
    refuse_wheel("1.0.0", "0001", None)
    with pytest.raises(
        Invalid, match=r"corral 1\.1\.0 \(schema 0023\) cannot be installed again: corral 1\.3\.0 has removed"
    ):
        refuse_wheel("1.1.0", "0023", floor)


def test_every_after_migration_of_ours_says_which_schema_still_works() -> None:
    for file in sorted((SCRIPTS / "versions").glob("0*.py")):
        text = file.read_text()
        assert text.startswith(('"""Before:', '"""After:')) or file.name.startswith("0001_"), file.name
        assert not text.startswith('"""After:') or "oldest_schema" in text, file.name


async def test_an_older_database_is_refused_where_migrating_is_not_allowed(url: str, tmp_path: Path) -> None:
    with pytest.raises(Invalid, match=f"has schema {head_of()}, this corral needs 0902"):
        async with open_store(url, scripts=later(tmp_path), may_migrate=False):
            pass
    async with open_store(url, may_migrate=False) as store:
        assert await revision(store) == head_of()


async def test_an_empty_database_is_refused_where_migrating_is_not_allowed(empty_url: str) -> None:
    with pytest.raises(Invalid, match="has schema none"):
        async with open_store(empty_url, may_migrate=False):
            pass


async def test_a_step_that_fails_leaves_everything_as_it_was(url: str, tmp_path: Path) -> None:
    broken = BEFORE.format(head=head_of(), then="raise ZeroDivisionError('half way')")
    with pytest.raises(ZeroDivisionError, match="half way"):
        async with open_store(url, scripts=with_steps(tmp_path, _0901_before_zones=broken)):
            pass
    async with open_store(url) as store:
        assert await revision(store) == head_of()
        with pytest.raises(Exception, match="zones"):
            await fetched(store, "SELECT * FROM zones")
    async with open_store(url, scripts=later(tmp_path)) as store:  # mended, it goes through
        assert await revision(store) == "0902"


async def test_a_database_of_another_program_is_refused(empty_url: str, tmp_path: Path) -> None:
    foreign = with_steps(tmp_path)
    first, *others = sorted((foreign / "versions").glob("[0-9]*.py"))
    for other in others:
        other.unlink()
    first.write_text(
        'from alembic import op\nimport sqlalchemy as sa\nrevision = "0001"\ndown_revision = None\n'
        'def upgrade() -> None:\n    op.create_table("node_labels", sa.Column("id", sa.Integer))\n'
    )
    async with open_store(empty_url, scripts=foreign) as store, store.write() as tx:
        await tx.execute(f"DROP TABLE {VERSION_TABLE}")
    with pytest.raises(Invalid, match=r"another program's tables \(node_labels\)"):
        async with open_store(empty_url):
            pass


async def test_waiting_for_another_migration_has_an_end(sqlite_url: str, tmp_path: Path) -> None:
    short = StoreOptions(migration_wait_s=0.2)
    with processes.locked(tmp_path / "corral.db"), pytest.raises(Unavailable, match="locked"):
        async with open_store(sqlite_url, options=short, scripts=later(tmp_path)):
            pass


async def test_waiting_for_another_migration_on_postgresql_has_an_end(postgres_url: str, tmp_path: Path) -> None:
    async with open_store(postgres_url) as holder, holder.write() as tx:
        await tx.fetch_one("SELECT pg_advisory_xact_lock(109330312618348)")
        with pytest.raises(Unavailable, match="lock timeout"):
            async with open_store(postgres_url, options=StoreOptions(migration_wait_s=0.2), scripts=later(tmp_path)):
                pass
