"""Which libraries of the system a backend lacks, and what its user is told to type."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import pytest

from corral.contract.manifest import Needs
from corral.kit.errors import Invalid
from corral.worker.system.libraries import (
    MissingLibraries,
    SystemLibraries,
    find_missing,
    is_bundled,
    libraries_named_in,
    packages_for,
)
from corral.worker.system.packages import PackageManager

OPENMP = Needs(("libgomp.so.1",), ("libgomp1",))


def manager(tmp_path: Path, *, debian: bool = True, root: bool = False, enabled: bool = True) -> PackageManager:
    """Of a machine with or without an `apt-get`; nothing is run here."""
    program = tmp_path / "bin" / "apt-get"
    program.parent.mkdir(exist_ok=True)
    program.write_text("#!/bin/sh\nexit 1\n")
    program.chmod(0o755)
    version = tmp_path / "debian_version"
    if debian:
        version.write_text("12.11\n")
    return PackageManager(enabled, env={"PATH": str(program.parent)}, is_root=root, debian_version=version)


class Linker:
    """A machine on which libraries come and go."""

    def __init__(self, *lacking: str) -> None:
        self.lacking = set(lacking)
        self.looks = 0

    def __call__(self, libraries: Collection[str]) -> frozenset[str]:
        self.looks += 1
        return frozenset(libraries) & self.lacking


@pytest.mark.parametrize(
    ("line", "found"),
    [
        (
            "/b/run: error while loading shared libraries: libgomp.so.1: cannot open shared object file: No such file",
            ("libgomp.so.1",),
        ),
        ("ImportError: libcudart.so.12: cannot open shared object file: No such file", ("libcudart.so.12",)),
        ("llama.cpp did not start: libstdc++.so.6: cannot open shared object file", ("libstdc++.so.6",)),
        ("OSError: libze_loader.so: cannot open shared object file", ("libze_loader.so",)),
        ("/opt/x/libfoo.so.1: cannot open shared object file", ()),  # a path: no package is meant
        ("cannot open shared object file", ()),
        ("libgomp.so.1 is there", ()),
    ],
)
def test_what_a_process_could_not_open_is_read_from_its_lines(line: str, found: tuple[str, ...]) -> None:
    assert libraries_named_in(["before", line, line, "after"]) == found


def test_packages_are_the_manifests_or_those_we_know() -> None:
    assert packages_for(["libgomp.so.1"], Needs(("libgomp.so.1",), ("mine",))) == ("mine",)
    assert packages_for(["libgomp.so.1"], Needs(("libgomp.so.1",))) == ("libgomp1",)
    assert packages_for(["libgomp.so.1"], Needs(("libother.so.2",), ("other",))) == ("libgomp1",)
    assert packages_for(["libssl.so.3", "libcrypto.so.3"], None) == ("libssl3",)
    assert packages_for(["libnobody-knows.so.9"], None) == ()


def test_the_linker_itself_is_asked() -> None:
    assert find_missing(["libc.so.6", "libcorral-has-none-such.so.1"]) == {"libcorral-has-none-such.so.1"}
    assert find_missing([]) == frozenset()


@pytest.mark.parametrize(
    ("path", "found"),
    [
        ("venv/lib/python3.11/site-packages/x.libs/libgomp-a34b3233.so.1.0.0", True),
        ("lib/libgomp.so.1", True),
        ("lib/libgomp-a34b3233.so.1.0.0", False),  # renamed, and no wheel's folder: nothing would look for it
        ("x.libs/libgompish.so.1", False),
    ],
)
def test_a_build_may_bring_a_library_itself(tmp_path: Path, path: str, found: bool) -> None:
    (tmp_path / path).parent.mkdir(parents=True)
    (tmp_path / path).touch()
    assert is_bundled("libgomp.so.1", tmp_path) is found


@pytest.mark.parametrize(
    ("machine", "words"),
    [
        ({}, "llama-cpp needs libgomp.so.1, which this machine lacks (the worker is not root)"
             " → sudo apt-get install libgomp1"),
        ({"root": True, "enabled": False}, "llama-cpp needs libgomp.so.1, which this machine lacks"
             " (this worker runs with --no-install-system-packages) → apt-get install libgomp1"),
        ({"debian": False, "root": True}, "llama-cpp needs libgomp.so.1, which this machine lacks"
             " → install the package that has libgomp.so.1 (on Debian: libgomp1)"),
    ],
)  # fmt: skip
async def test_a_refusal_names_library_and_command(tmp_path: Path, machine: dict[str, bool], words: str) -> None:
    libraries = SystemLibraries(manager(tmp_path, **machine), find=Linker("libgomp.so.1"))
    with pytest.raises(MissingLibraries) as refused:
        await libraries.ensure("llama-cpp", OPENMP)
    assert refused.value.message == words
    assert (refused.value.libraries, refused.value.permanent) == (("libgomp.so.1",), True)


async def test_nothing_is_asked_of_a_machine_that_has_it_or_a_build_that_brings_it(tmp_path: Path) -> None:
    has, lacks = (SystemLibraries(manager(tmp_path), find=linker) for linker in (Linker(), Linker("libgomp.so.1")))
    await has.ensure("llama-cpp", OPENMP)
    for nothing in (None, Needs(), Needs(debian=("libgomp1",))):
        await lacks.ensure("llama-cpp", nothing)
    (tmp_path / "build" / "libs").mkdir(parents=True)
    (tmp_path / "build" / "libs" / "libgomp.so.1").touch()
    await lacks.ensure("llama-cpp", OPENMP, directory=tmp_path / "build")


@pytest.mark.parametrize("needs", [Needs(("libx.so.1",), ("-oDPkg::Pre-Invoke=x",)), Needs(("../x.so.1",), ("x1",))])
async def test_an_order_with_a_hostile_name_is_refused_before_anything_is_run(tmp_path: Path, needs: Needs) -> None:
    linker = Linker("libx.so.1")
    with pytest.raises(Invalid):
        await SystemLibraries(manager(tmp_path, root=True), find=linker).ensure("b", needs)
    assert linker.looks == 0


async def test_what_is_there_is_looked_for_again_only_when_something_was_installed(tmp_path: Path) -> None:
    cache, linker = tmp_path / "ld.so.cache", Linker("libgomp.so.1")
    cache.touch()
    libraries = SystemLibraries(manager(tmp_path), find=linker, linker_cache=cache)
    assert not libraries.has(OPENMP.libraries), "not checked yet"
    assert await libraries.refresh(OPENMP.libraries)
    assert libraries.lacks(OPENMP.libraries) == ("libgomp.so.1",)
    assert not await libraries.refresh(OPENMP.libraries)
    assert linker.looks == 2, "as long as it is missing it is looked for"
    linker.lacking.clear()
    assert await libraries.refresh(OPENMP.libraries)
    assert libraries.has(OPENMP.libraries)
    assert not await libraries.refresh(OPENMP.libraries)
    assert linker.looks == 3
    cache.unlink()  # as after ldconfig: another file
    linker.lacking.add("libgomp.so.1")
    assert await libraries.refresh(OPENMP.libraries)
    assert not libraries.has(OPENMP.libraries)


async def test_the_problem_of_an_installed_build(tmp_path: Path) -> None:
    libraries = SystemLibraries(manager(tmp_path), find=Linker("libgomp.so.1"))
    await libraries.refresh(OPENMP.libraries)
    words = "llama-cpp needs libgomp.so.1, which this machine lacks → sudo apt-get install libgomp1"
    assert await libraries.problem_of("llama-cpp", OPENMP, tmp_path / "build") == words
    assert await libraries.problem_of("mock", None, tmp_path / "build") == ""
    (tmp_path / "build").mkdir()
    (tmp_path / "build" / "libgomp.so.1").touch()
    assert await libraries.problem_of("llama-cpp", OPENMP, tmp_path / "build") == ""
