"""Reading galleries lazily, remembering them, and doing without them."""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path

import pytest

from corral.gallery.backends.catalogue import AliasGroup, UnknownBackend
from corral.gallery.backends.entries import BackendEntry, BackendIndex, read_index
from corral.gallery.backends.library import BackendLibrary, LibraryOptions
from corral.gallery.galleries import BUILT_IN, Gallery
from corral.gallery.index_cache import usable_candidates
from corral.gallery.index_fetcher import IndexFetcher
from corral.kit.errors import Unavailable, Unreachable
from tests.support.manual_clock import ManualClock
from tests.support.waiting import until

ONE = b"- {name: one, uri: 'https://example.com/1.tar'}\n- {name: shared, uri: 'https://example.com/s1.tar'}\n"
TWO = b"- {name: two, alias: pair, uri: 'https://example.com/2.tar'}\n- {name: shared, uri: 'https://example.com/s2.tar'}\n"
OWN = b"""
- {name: own, uri: 'https://example.com/o.tar'}
- {name: chooser, capabilities: {default: own, nvidia: "g@one", amd: "h@two"}}
"""
G = Gallery("g", "https://g/index.yaml", ("https://mirror/g.yaml",))
H = Gallery("h", "https://h/index.yaml")


class FakeWeb:
    """Answers by URL; what it has none for cannot be reached. A URL in `holding` answers when it is let go."""

    def __init__(self, **_: object) -> None:
        self.pages: dict[str, bytes] = {}
        self.requests: list[str] = []
        self.holding: dict[str, asyncio.Event] = {}

    async def fetch(self, url: str) -> bytes:
        self.requests.append(url)
        if url in self.holding:
            await self.holding[url].wait()
        if url not in self.pages:
            raise Unreachable(f"{url} is down")
        return self.pages[url]


def own() -> BackendIndex:
    return read_index(BUILT_IN, OWN)


class Setup:
    def __init__(self, tmp_path: Path, **options: float) -> None:
        self.web = FakeWeb()
        self.clock = ManualClock()
        self.folder = tmp_path
        self.options = LibraryOptions(**options)
        self.library = self.again()

    def again(self) -> BackendLibrary:
        """A process that has just started."""
        return BackendLibrary(
            [G, H], self.web.fetch, clock=self.clock, cache_folder=self.folder, options=self.options, built_in=own
        )

    async def find(self, query: str) -> BackendEntry | AliasGroup | UnknownBackend:
        return (await self.library.find(query))[0]

    async def found(self, query: str) -> str:
        got = await self.find(query)
        return got.id if isinstance(got, BackendEntry) else type(got).__name__


@pytest.fixture
def setup(tmp_path: Path) -> Setup:
    setup = Setup(tmp_path)
    setup.web.pages = {G.url: ONE, H.url: TWO}
    return setup


async def test_what_is_built_in_waits_for_nobody(setup: Setup) -> None:
    assert await setup.found("own") == "corral@own"
    assert setup.web.requests == []


async def test_galleries_are_read_in_order_and_no_further_than_needed(setup: Setup) -> None:
    assert await setup.found("shared") == "g@shared"
    assert setup.web.requests == [G.url]
    assert await setup.found("h@shared") == "h@shared"
    assert await setup.found("two") == "h@two"
    assert setup.web.requests == [G.url, H.url]


async def test_a_named_gallery_is_the_only_one_read(setup: Setup) -> None:
    assert await setup.found("H@two") == "h@two"
    assert setup.web.requests == [H.url]


async def test_aliases_come_after_the_names_of_all_galleries(setup: Setup) -> None:
    group = await setup.find("pair")
    assert isinstance(group, AliasGroup)
    assert [build.id for build in group.builds] == ["h@two"]


async def test_an_unknown_gallery(setup: Setup) -> None:
    got = await setup.find("nowhere@two")
    assert isinstance(got, UnknownBackend)
    assert got.reason == "no gallery is called 'nowhere'; there are corral, g, h"
    assert setup.web.requests == []


async def test_only_the_galleries_a_machine_needs_are_read_for_a_meta(setup: Setup) -> None:
    meta, catalogue = await setup.library.find("chooser")
    assert isinstance(meta, BackendEntry)
    await setup.library.with_builds(meta, catalogue, [("default", "linux/amd64")])
    assert setup.web.requests == []
    more = await setup.library.with_builds(meta, catalogue, [("nvidia-cuda-12", "linux/amd64")])
    assert setup.web.requests == [G.url]
    assert [index.gallery.name for index in more.indexes] == ["corral", "g"]


async def test_an_index_is_remembered_for_an_hour(setup: Setup) -> None:
    await setup.library.catalogue()
    setup.clock.advance(3599)
    await setup.library.catalogue()
    assert len(setup.web.requests) == 2
    setup.clock.advance(1)
    setup.web.pages[G.url] = TWO
    assert [entry.name for entry in (await setup.library.catalogue("g")).entries] == ["two", "shared"]


async def test_forgetting_reads_again(setup: Setup) -> None:
    await setup.library.catalogue()
    setup.library.invalidate()
    await setup.library.catalogue()
    assert setup.web.requests.count(G.url) == 2


async def test_the_mirror_is_asked_when_the_primary_fails(setup: Setup) -> None:
    setup.web.pages = {"https://mirror/g.yaml": ONE}
    assert await setup.found("one") == "g@one"
    assert setup.web.requests == [G.url, "https://mirror/g.yaml"]


async def test_a_failed_candidate_is_passed_over_for_ten_minutes(tmp_path: Path) -> None:
    setup = Setup(tmp_path, fresh_s=1, skip_s=600)
    setup.web.pages = {"https://mirror/g.yaml": ONE}
    await setup.library.index(G)
    setup.clock.advance(599)
    await setup.library.index(G)
    assert setup.web.requests == [G.url, "https://mirror/g.yaml", "https://mirror/g.yaml"]
    setup.clock.advance(2)
    await setup.library.index(G)
    assert setup.web.requests[3:] == [G.url, "https://mirror/g.yaml"]


def test_candidates_that_all_failed_are_all_tried() -> None:
    assert usable_candidates(("a", "b"), {"a": 5.0, "b": 8.0}, 10.0, 10.0) == ("a", "b")
    assert usable_candidates(("a", "b"), {"a": 5.0}, 10.0, 10.0) == ("b",)
    assert usable_candidates(("a", "b"), {"a": 5.0}, 15.0, 10.0) == ("a", "b")


@pytest.mark.parametrize(
    "page", [b"", b"[]", b"a: b", b"<html>Please sign in</html>", b"- just\n- words\n", b"\xff\xfe\x00", b"- x: [\n"]
)
async def test_a_page_that_is_no_index_counts_as_a_failure(setup: Setup, page: bytes) -> None:
    setup.web.pages = {G.url: page, "https://mirror/g.yaml": ONE}
    assert await setup.found("one") == "g@one"


async def test_a_candidate_that_takes_too_long_is_given_up(tmp_path: Path) -> None:
    setup = Setup(tmp_path, candidate_s=0.05)
    setup.web.pages = {G.url: ONE, "https://mirror/g.yaml": ONE}
    setup.web.holding[G.url] = asyncio.Event()
    assert await setup.found("one") == "g@one"
    assert setup.web.requests == [G.url, "https://mirror/g.yaml"]


async def test_absence_is_harmless_and_said(setup: Setup) -> None:
    setup.web.pages = {H.url: TWO}
    catalogue = await setup.library.catalogue()
    assert [entry.name for entry in catalogue.entries] == ["own", "chooser", "two", "shared"]
    assert catalogue.unread == {"g": "https://g/index.yaml is down; https://mirror/g.yaml is down"}
    got = await setup.find("ones")
    assert isinstance(got, UnknownBackend)
    assert "the gallery g could not be read" in got.reason


async def test_nobody_waits_again_for_what_has_just_failed(setup: Setup) -> None:
    setup.web.pages = {}
    await setup.library.catalogue("g")
    await setup.library.catalogue("g")
    assert setup.web.requests == [G.url, "https://mirror/g.yaml"]
    setup.web.pages = {G.url: ONE}
    setup.clock.advance(60)
    assert await setup.found("one") == "g@one"


async def test_the_last_good_copy_outlives_the_process(setup: Setup) -> None:
    await setup.library.catalogue()
    copy = setup.folder / "gallery" / f"{hashlib.sha256(G.url.encode()).hexdigest()}.yaml"
    assert copy.read_bytes() == ONE
    setup.web.pages = {}
    setup.library = setup.again()
    assert await setup.found("one") == "g@one"


async def test_a_copy_from_the_disk_is_replaced_as_soon_as_somebody_answers(setup: Setup) -> None:
    await setup.library.catalogue()
    setup.web.pages = {}
    setup.library = setup.again()
    assert await setup.found("one") == "g@one"
    setup.web.pages = {G.url: TWO}
    setup.clock.advance(60)
    assert await setup.found("g@two") == "g@two"


async def test_an_old_copy_in_memory_is_used_when_reading_again_fails(setup: Setup) -> None:
    await setup.library.catalogue()
    setup.web.pages = {}
    setup.clock.advance(4000)
    assert await setup.found("one") == "g@one"
    assert await setup.found("two") == "h@two"


async def test_a_bad_page_does_not_replace_the_good_copy(setup: Setup) -> None:
    await setup.library.catalogue()
    setup.web.pages = {G.url: b"[]"}
    setup.clock.advance(4000)
    await setup.library.catalogue()
    setup.library = setup.again()
    assert await setup.found("one") == "g@one"


async def test_a_damaged_copy_is_no_copy(setup: Setup) -> None:
    await setup.library.catalogue()
    for path in (setup.folder / "gallery").iterdir():
        path.write_bytes(b"a: b")
    setup.web.pages = {}
    setup.library = setup.again()
    with pytest.raises(Unavailable):
        await setup.library.index(G)


async def test_a_folder_nothing_can_be_kept_in_is_no_obstacle(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    setup = Setup(tmp_path / "file")
    setup.web.pages = {G.url: ONE}
    assert await setup.found("one") == "g@one"


async def test_many_who_ask_at_once_cost_one_reading(setup: Setup) -> None:
    held = setup.web.holding[G.url] = asyncio.Event()
    asking = [asyncio.create_task(setup.library.index(G)) for _ in range(20)]
    await until(lambda: setup.web.requests)
    asking[0].cancel()  # the first caller loses interest; the reading goes on for the others
    await until(asking[0].done)
    held.set()
    results = await asyncio.gather(*asking, return_exceptions=True)
    assert isinstance(results[0], asyncio.CancelledError)
    assert len({id(result) for result in results[1:]}) == 1
    assert setup.web.requests == [G.url]


async def test_without_ours_for_somebody_elses_controller(setup: Setup) -> None:
    library = BackendLibrary([G], setup.web.fetch, clock=setup.clock, built_in=None)
    assert [gallery.name for gallery in library.galleries] == ["g"]
    assert isinstance((await library.find("own"))[0], UnknownBackend)


async def test_a_gallery_that_cannot_be_read_is_told_in_one_short_sentence(setup: Setup) -> None:
    assert [state.notice for state in setup.library.states()] == ["", ""], "nobody has asked yet"
    await setup.library.check()
    del setup.web.pages[G.url], setup.web.pages[H.url]
    setup.library.invalidate()
    assert [state.notice for state in await setup.library.check()] == [
        "The gallery g cannot be read (https://g/index.yaml is down); its last good copy is used.",
        "The gallery h cannot be read (https://h/index.yaml is down); its last good copy is used.",
    ]
    setup.web.pages = {G.url: ONE, H.url: TWO}
    setup.library.invalidate()
    assert [(state.notice, state.entries) for state in await setup.library.check()] == [("", 2), ("", 2)]


async def test_a_changed_file_is_seen_at_once(tmp_path: Path) -> None:
    """Also one that comes, goes or is named by a `.ref`; and also while it is being read."""

    async def refuse(url: str) -> bytes:
        raise Unreachable(f"{url} is down")

    index, ref = tmp_path / "index.yaml", tmp_path / "index.ref"
    galleries = [Gallery("f", f"file://{index}"), Gallery("r", f"file://{ref}")]
    fetcher = IndexFetcher(refuse, base_folder=tmp_path)
    library = BackendLibrary(galleries, fetcher.fetch, clock=ManualClock(), built_in=None)

    async def names() -> list[list[str]]:
        return [[entry.name for entry in index.entries] for index in (await library.catalogue()).indexes]

    assert await names() == []
    index.write_bytes(ONE)
    assert await names() == [["one", "shared"]]
    ref.write_text("index.yaml")
    assert await names() == [["one", "shared"], ["one", "shared"]]
    index.write_bytes(TWO)
    assert await names() == [["two", "shared"], ["two", "shared"]]
    other = tmp_path / "other.yaml"
    other.write_bytes(OWN)
    ref.write_text("other.yaml")
    assert (await names())[1][0] == "own"
    index.unlink()
    assert (await names())[0] == ["two", "shared"], "what was read before stands in for it"
    assert [bool(state.notice) for state in library.states()] == [True, False]


async def test_a_file_that_changes_while_it_is_read_is_read_again(tmp_path: Path) -> None:
    index = tmp_path / "index.yaml"
    index.write_bytes(ONE)
    web = FakeWeb()
    web.pages = {(url := f"file://{index}"): ONE}
    web.holding[url] = asyncio.Event()
    library = BackendLibrary([Gallery("f", url)], web.fetch, clock=ManualClock(), built_in=None)
    reading = asyncio.create_task(library.catalogue())
    await until(lambda: web.requests == [url])
    index.write_bytes(TWO)
    web.holding[url].set()
    assert (await reading).indexes[0].entries[0].name == "one"
    web.pages[url] = TWO
    assert (await library.catalogue()).indexes[0].entries[0].name == "two"
    await library.catalogue()
    assert len(web.requests) == 2, "what has not changed is not read again"
