"""What exists only for LocalAI sits in three packages: a Corral without them joins, installs, loads and answers."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from tests.compat.baseline import ROOT, Release, make_release
from tests.compat.one_node import add_model, chat, install, join, open_cluster

PACKAGES = ("controller/localai", "controller/api/localai", "worker/localai")
# The modules that import them, each when it is called. Without the packages the first offers nothing, and the worker
# does not ask for the orders of LocalAI controllers.
WIRING, WORKER = "controller/wiring/localai.py", "worker/main.py"
EMPTY_WIRING = """
import contextlib

@contextlib.asynccontextmanager
async def open_localai(*_):
    yield None

def localai_routes():
    return ()
"""


def test_two_modules_import_the_packages_of_localai() -> None:
    source = ROOT / "src" / "corral"
    names = "|".join(package.replace("/", "[.]") for package in PACKAGES)
    imports = re.compile(rf"^ *(from|import) corral[.]({names})\b", re.MULTILINE)
    found = {str(path.relative_to(source)) for path in source.rglob("*.py") if imports.search(path.read_text())}
    outside = {path for path in found if not path.startswith(tuple(f"{package}/" for package in PACKAGES))}
    assert outside == {WIRING, WORKER}


@pytest.fixture(scope="module")
def without_localai(tmp_path_factory: pytest.TempPathFactory) -> Release:
    folder = tmp_path_factory.mktemp("without-localai")
    source = folder / "tree" / "src" / "corral"
    shutil.copytree(ROOT / "src" / "corral", source, ignore=shutil.ignore_patterns("__pycache__"))
    for package in PACKAGES:
        shutil.rmtree(source / package)
    (source / WIRING).write_text(EMPTY_WIRING)
    worker = (source / WORKER).read_text()
    assert worker.count("with_localai: bool = True") == 1
    (source / WORKER).write_text(worker.replace("with_localai: bool = True", "with_localai: bool = False"))
    shutil.copytree(ROOT / "backends", folder / "tree" / "backends", ignore=shutil.ignore_patterns("__pycache__"))
    return make_release(folder)


def test_a_corral_without_them_answers(tmp_path: Path, without_localai: Release) -> None:
    with open_cluster(tmp_path, f"sqlite:///{tmp_path}/corral.db") as cluster:
        cluster.corral = without_localai.corral
        cluster.start()
        join(cluster)
        install(cluster)
        add_model(cluster)
        assert chat(cluster, "hello") == "mock 1: hello"
