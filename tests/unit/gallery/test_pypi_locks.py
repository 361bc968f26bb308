"""Tags, the choice of a wheel, digests of locks, and reading what uv and pip write."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st
from packaging.tags import Tag

from corral.contract.sources import TextFile, Wheel
from corral.gallery.pypi import pip, uv
from corral.gallery.pypi.lock import NoWheels, digest_of_files, digest_of_lock
from corral.gallery.pypi.wheel_tags import MinimumSystem, choose_wheel, supported_tags
from corral.kit.errors import CorralError, Failed, Invalid, NotFound, Unreachable
from corral.kit.subprocesses import CapturedOutput

LINUX = supported_tags("linux/amd64", "3.11")
HASH = "a" * 64


def names(tags: Mapping[Tag, int]) -> list[str]:
    return [str(tag) for tag in tags]


def wheel(name: str, **more: object) -> Wheel:
    return Wheel(name, f"https://i.example/{name}", HASH, **more)  # type: ignore[arg-type]


def chosen(names: list[str], platform: str = "linux/amd64", python: str = "3.11") -> str | None:
    found = choose_wheel([wheel(name) for name in names], supported_tags(platform, python))
    return found.name if found is not None else None


@pytest.mark.parametrize(
    ("names", "best"),
    [
        (["a-1-py3-none-any.whl", "a-1-cp311-cp311-manylinux_2_17_x86_64.whl"], 1),
        (["a-1-cp310-abi3-manylinux2014_x86_64.whl", "a-1-cp39-abi3-manylinux_2_28_x86_64.whl"], 0),
        (["a-1-cp311-cp311-manylinux_2_17_x86_64.manylinux2014_x86_64.whl", "a-1-cp310-abi3-linux_x86_64.whl"], 0),
        (["a-1-cp311-cp311-manylinux_2_17_x86_64.whl", "a-1-cp311-cp311-manylinux_2_28_x86_64.whl"], 1),
        (["a-1-py2.py3-none-any.whl", "a-1-cp312-cp312-manylinux_2_17_x86_64.whl"], 0),
        (["a-1-1-py3-none-any.whl", "a-1-2b-py3-none-any.whl", "a-1-py3-none-any.whl"], 1),
        (["a-1-py3-none-manylinux_2_5_x86_64.manylinux1_x86_64.whl"], 0),
        (["a-1-cp311-cp311-manylinux_2_31_x86_64.whl"], None),  # newer than the oldest system we serve
        (["a-1-cp311-cp311-manylinux_2_17_aarch64.whl", "a-1-cp311-cp311-win_amd64.whl"], None),
        (["a-1-cp312-abi3-manylinux_2_17_x86_64.whl", "a-1-cp310-cp310-manylinux_2_17_x86_64.whl"], None),
        (["a-1-cp311-cp311-musllinux_1_2_x86_64.whl", "a-1-pp311-pypy311_pp73-manylinux_2_17_x86_64.whl"], None),
        (["a-1.tar.gz", "a.whl", "a-1-py3-none-any.whl.metadata", "../a-1-py3-none-any.whl"], None),
        ([], None),
    ],
)
def test_the_wheel_made_most_closely_for_the_machine(names: list[str], best: int | None) -> None:
    assert chosen(names) == (names[best] if best is not None else None)


@pytest.mark.parametrize(
    ("platform", "tag"),
    [
        ("linux/arm64", "cp311-abi3-manylinux2014_aarch64"),
        ("darwin/arm64", "cp311-cp311-macosx_13_0_arm64"),
        ("darwin/arm64", "cp311-cp311-macosx_11_0_universal2"),
        ("darwin/amd64", "cp311-cp311-macosx_10_9_x86_64"),
    ],
)
def test_tags_of_other_platforms(platform: str, tag: str) -> None:
    assert tag in names(supported_tags(platform, "3.11"))


def test_tags_that_are_not_for_it() -> None:
    assert "cp311-cp311-macosx_10_9_arm64" not in names(supported_tags("darwin/arm64", "3.11"))
    assert "cp311-cp311-macosx_15_0_arm64" not in names(supported_tags("darwin/arm64", "3.11"))
    assert "cp311-cp311-macosx_15_0_arm64" in names(
        supported_tags("darwin/arm64", "3.11", MinimumSystem(macos=(15, 0)))
    )
    assert "cp311-cp311-manylinux_2_31_x86_64" in names(
        supported_tags("linux/amd64", "3.11", MinimumSystem(glibc=(2, 31)))
    )
    assert "py312-none-any" not in names(LINUX)
    assert "py310-none-any" in names(LINUX)


@pytest.mark.parametrize(("platform", "python"), [("", "3.11"), ("windows/amd64", "3.11"), ("linux/riscv64", "3.11")])
def test_platforms_nobody_serves(platform: str, python: str) -> None:
    with pytest.raises(Invalid):
        supported_tags(platform, python)


@pytest.mark.parametrize("python", ["", "3", "2.7", "3.11.2", "3.x", "3.11\n"])
def test_versions_that_are_none(python: str) -> None:
    with pytest.raises(Invalid):
        supported_tags("linux/amd64", python)


@given(st.lists(st.sampled_from(sorted(names(LINUX))), min_size=1, unique=True), st.randoms())
def test_all_controllers_choose_the_same(tags: list[str], random: object) -> None:
    wheels = [wheel(f"a-1-{tag}.whl") for tag in tags]
    shuffled = list(wheels)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    first = choose_wheel(wheels, LINUX)
    assert first == choose_wheel(shuffled, LINUX)
    assert first is not None
    ranks = {str(tag): rank for tag, rank in LINUX.items()}
    assert ranks[first.name[len("a-1-") : -len(".whl")]] == min(ranks[tag] for tag in tags)


ONE = wheel("a-1-py3-none-any.whl", project="a", version="1")
TWO = wheel("b-2-py3-none-any.whl", project="b", version="2")


def test_a_digest_is_of_what_is_installed() -> None:
    whole = digest_of_lock([ONE, TWO])
    assert whole == digest_of_lock([TWO, ONE])
    assert whole.startswith("sha256:")
    assert len(whole) == 71
    moved = Wheel(TWO.name, "https://mirror.example/b", TWO.sha256, 99, TWO.project, TWO.version)
    assert digest_of_lock([ONE, moved]) == whole
    other = Wheel(TWO.name, TWO.url, "b" * 64, 0, TWO.project, TWO.version)
    assert digest_of_lock([ONE, other]) != whole
    assert digest_of_lock([ONE]) != whole
    glue = digest_of_lock([ONE, TWO], [TextFile("serve.py", "1")])
    assert glue not in (whole, digest_of_lock([ONE, TWO], [TextFile("serve.py", "2")]))
    assert digest_of_files([TextFile("a", "1"), TextFile("b", "2")]) == digest_of_files(
        [TextFile("b", "2"), TextFile("a", "1")]
    )
    assert digest_of_files([TextFile("a", "1")]) != digest_of_files([TextFile("a", "1", executable=True)])


PYLOCK = f"""
lock-version = "1.0"
created-by = "uv"
[[packages]]
name = "Engine_X"
version = "2.1"
wheels = [
  {{ url = "https://i.example/p/engine_x-2.1-py3-none-any.whl", size = 5, hashes = {{ sha256 = "{HASH}" }} }},
  {{ url = "https://i.example/engine_x-2.1-cp311-cp311-manylinux_2_17_x86_64.whl", hashes = {{ sha256 = "{HASH}" }} }},
]
[[packages]]
name = "a-helper"
version = "0.1"
marker = "sys_platform == 'linux'"
[[packages.wheels]]
url = "https://i.example/p/a_helper-0.1%2Blocal-py3-none-any.whl"
size = 7
hashes = {{ sha256 = "{HASH}" }}
"""


def test_what_uv_writes() -> None:
    lock = uv.read_pylock(PYLOCK, "engine-x[fast]==2.1", "3.11", LINUX)
    assert (lock.requirement, lock.version, lock.python) == ("engine-x==2.1", "2.1", "3.11")
    assert [(w.project, w.name, w.size) for w in lock.wheels] == [
        ("a-helper", "a_helper-0.1+local-py3-none-any.whl", 7),
        ("engine-x", "engine_x-2.1-cp311-cp311-manylinux_2_17_x86_64.whl", 0),
    ]


@pytest.mark.parametrize(
    ("text", "error", "word"),
    [
        ("not toml = = =", Failed, "cannot be read"),
        ("", Failed, "does not contain"),
        (PYLOCK.replace("Engine_X", "other"), Failed, "does not contain"),
        (PYLOCK.replace(HASH, "short"), Failed, "sha256"),
        (PYLOCK.replace("https://i.example", "file:///wheels"), Failed, "nodes cannot fetch"),
        (PYLOCK.replace("py3-none-any", "cp39-cp39-win32"), NoWheels, "a-helper 0.1"),
    ],
)
def test_locks_that_will_not_do(text: str, error: type[CorralError], word: str) -> None:
    with pytest.raises(error, match=word):
        uv.read_pylock(text, "engine-x", "3.11", LINUX)


@pytest.mark.parametrize(
    ("status", "said", "error"),
    [
        (1, "error: No solution found\n cause: Because engine has no wheels with a matching platform tag", NoWheels),
        (1, "Because nothere was not found in the package registry and you require nothere, we can", NotFound),
        (1, "Because there is no version of app==9 and you require app==9, we can conclude", NotFound),
        (2, "error: Failed to fetch: http://127.0.0.1:1/shelf/app/ Connection refused", Unreachable),
    ],
)
def test_what_uv_says_in_our_words(status: int, said: str, error: type[CorralError]) -> None:
    told = uv.explain("app", "linux/amd64", "3.11", CapturedOutput(status, "", said))
    assert type(told) is error
    assert "we can conclude" not in told.message


REPORT = b"""{"version":"1","install":[
 {"metadata":{"name":"Engine_X","version":"2.1"},"download_info":{"url":"https://i.example/engine_x-2.1-py3-none-any.whl",
  "archive_info":{"hashes":{"sha256":"%s"}}}}]}""" % HASH.encode()


def test_what_pip_writes() -> None:
    lock = pip.read_report(REPORT, "engine-x", "3.11")
    assert lock.requirement == "engine-x==2.1"
    assert lock.wheels[0].name == "engine_x-2.1-py3-none-any.whl"
    assert lock.wheels[0].sha256 == HASH


@pytest.mark.parametrize("body", [b"", b"[]", b"{}", b'{"install":[{}]}', b'{"install":[]}', b"\xff"])
def test_reports_that_will_not_do(body: bytes) -> None:
    with pytest.raises(Failed):
        pip.read_report(body, "engine-x", "3.11")


@pytest.mark.parametrize(
    ("said", "error"),
    [
        ("ERROR: Could not find a version that satisfies x (from versions: none)\nNo matching distribution", NoWheels),
        ("ERROR: Could not find x==9 (from versions: 1.0)\nNo matching distribution found", NotFound),
        ("NewConnectionError: Failed to establish a new connection", Unreachable),
        ("ERROR: ResolutionImpossible", Failed),
    ],
)
def test_what_pip_says_in_our_words(said: str, error: type[CorralError]) -> None:
    assert type(pip.explain("x", "linux/amd64", CapturedOutput(1, "", said))) is error


async def test_pip_does_not_answer_for_other_machines() -> None:
    locker = pip.PipLocker(["/nonexistent/pip"], env={})
    with pytest.raises(Failed, match="install uv"):
        await locker.lock("x", platform="plan9/mips", python="3.11")
