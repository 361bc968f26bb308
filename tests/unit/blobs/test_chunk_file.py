"""A file that arrives in chunks: what survives the end of the process, and what is verified again."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from corral.blobs.chunks import ChunkList, list_chunks
from corral.blobs.swarm.chunk_file import ChunkFile, bitmap_path
from corral.kit.threads import StopToken

CHUNK = 1000


class Case:
    def __init__(self, folder: Path, content: bytes) -> None:
        whole = folder / "whole"
        whole.write_bytes(content)
        self.content = content
        self.listed: ChunkList = list_chunks(whole, chunk_bytes=CHUNK)
        self.path = folder / "x.sparse"
        self.boot_id = folder / "boot_id"
        self.boot_id.write_text("this boot\n")

    def open(self) -> ChunkFile:
        file = ChunkFile(self.path, self.listed, boot_id=self.boot_id)
        file.open(StopToken())
        return file

    def piece(self, index: int) -> list[bytes]:
        data = self.content[index * CHUNK : (index + 1) * CHUNK]
        return [data[:300], data[300:]]

    @property
    def digest(self) -> str:
        return "sha256:" + hashlib.sha256(self.content).hexdigest()


@pytest.fixture
def case(tmp_path: Path) -> Case:
    return Case(tmp_path, os.urandom(4 * CHUNK + 17))


def test_chunks_in_any_order_make_the_file(case: Case) -> None:
    file = case.open()
    for index in (3, 0, 4, 1, 2):
        assert file.write(index, case.piece(index))
    assert file.have_bytes == len(case.content)
    assert file.finish(StopToken()) == case.digest
    file.close()
    assert case.path.read_bytes() == case.content


@pytest.mark.parametrize("pieces", [[b"x" * CHUNK], [b""], [b"short"], []])
def test_a_wrong_chunk_is_not_stored(case: Case, pieces: list[bytes]) -> None:
    file = case.open()
    assert not file.write(1, pieces)
    assert not file.write(1, case.piece(2))
    assert len(file.have) == 0
    file.close()
    assert case.path.read_bytes() == bytes(len(case.content))


def test_another_process_continues_with_the_verified_chunks(case: Case) -> None:
    file = case.open()
    file.write(4, case.piece(4))
    file.write(1, case.piece(1))  # and the process is killed: nothing is closed
    again = case.open()
    assert list(again.have) == [1, 4]
    assert again.have_bytes == CHUNK + 17
    for index in (0, 2, 3):
        again.write(index, case.piece(index))
    assert again.finish(StopToken()) == case.digest
    again.close()
    file.close()


def test_after_a_restart_of_the_machine_every_chunk_is_hashed_again(case: Case) -> None:
    file = case.open()
    for index in (0, 1):
        file.write(index, case.piece(index))
    file.close()
    with case.path.open("r+b") as lost:  # the bitmap reached the disk, the bytes did not
        lost.seek(CHUNK)
        lost.write(bytes(CHUNK))
    case.boot_id.write_text("next boot\n")
    again = case.open()
    assert list(again.have) == [0]
    again.close()


@pytest.mark.parametrize("damage", [b"", b"no json", b'{"chunks":"x","boot_id":"this boot"}\n\xff', b"\x00" * 100])
def test_a_damaged_bitmap_costs_a_verification_and_no_chunk(case: Case, damage: bytes) -> None:
    file = case.open()
    file.write(2, case.piece(2))
    file.close()
    bitmap_path(case.path).write_bytes(damage)
    again = case.open()
    assert list(again.have) == [2]
    again.close()


def test_bytes_damaged_on_the_disk_are_found_at_the_end(case: Case) -> None:
    file = case.open()
    for index in (1, 2, 3, 4):
        file.write(index, case.piece(index))
    with case.path.open("r+b") as disk:
        disk.seek(2 * CHUNK)
        disk.write(b"damage")
    file.write(0, case.piece(0))
    assert file.finish(StopToken()) != case.digest
    assert file.verify_again(StopToken()) == 1
    assert list(file.have) == [0, 1, 3, 4]
    file.write(2, case.piece(2))
    assert file.finish(StopToken()) == case.digest
    file.close()


def test_an_empty_file_has_no_chunks(tmp_path: Path) -> None:
    case = Case(tmp_path, b"")
    file = case.open()
    assert file.have.is_complete
    assert file.have_bytes == 0
    assert file.finish(StopToken()) == case.digest
    file.close()


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_the_beginning_is_hashed_in_any_order_of_arrival(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    case = Case(tmp_path_factory.mktemp("order"), os.urandom(data.draw(st.integers(1, 8 * CHUNK))))
    file = case.open()
    for index in data.draw(st.permutations(range(len(case.listed.chunks)))):
        assert file.write(index, case.piece(index))
        if data.draw(st.booleans()):
            file.hash_beginning(StopToken())
    assert file.finish(StopToken()) == case.digest
    file.close()
