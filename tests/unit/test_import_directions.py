"""Packages import only the packages they may (README, "Map"), and no sub-packages import each other in circles."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.scripts import ROOT, load_script

SOURCE = Path(__file__).parents[2] / "src" / "corral"

ALLOWED = {
    "kit": set[str](),
    "contract": set[str](),
    "bus": {"contract"},
    "store": {"contract"},
    "relay": {"contract"},
    "client": {"contract"},
    "gateway": {"bus", "relay", "contract"},
    "blobs": {"contract"},
    "gallery": {"contract"},
    "inference": {"contract"},
    "worker": {"bus", "relay", "blobs", "gallery", "inference", "contract"},
    "controller": {"store", "bus", "blobs", "gallery", "inference", "contract"},
    "cli": {"client", "contract"},
    "sdk": {"contract"},
}
# `corral up` and friends start the roles: these modules alone reach into them, and only when they are called.
LAZY = {
    "cli": {"controller", "gateway", "worker", "bus", "store"},
}
PURE = [
    "controller/registry/transitions.py",
    "controller/registry/identity.py",
    "controller/registry/registration.py",
    "controller/health/classify.py",
    "controller/access/principal.py",
    "controller/backends/rules.py",
    "controller/backends/plan.py",
    "controller/backends/outcomes.py",
    "controller/backends/rollout.py",
    "controller/rollouts/hardware_class.py",
    "controller/rollouts/comparison.py",
    "controller/rollouts/options.py",
    "controller/rollouts/plan.py",
    "controller/rollouts/trial.py",
    "controller/replicas/trial_plan.py",
    "controller/trials/modes.py",
    "controller/operations/why.py",
    "controller/releases/plan.py",
    "controller/inventory/installed.py",
    "controller/backends/replacement.py",
    "controller/scheduler/world.py",
    "controller/scheduler/free_memory.py",
    "controller/scheduler/fit.py",
    "controller/scheduler/placement.py",
    "controller/scheduler/eviction.py",
    "controller/scheduler/scaling.py",
    "contract/gguf.py",
    "controller/scheduler/memory.py",
    "controller/scheduler/explain.py",
    "controller/operations/state.py",
    "controller/replicas/load_jobs.py",
    "controller/replicas/lifecycle.py",
    "controller/replicas/plan_input.py",
    "controller/replicas/scheduler_replicas.py",
    "controller/replicas/plan.py",
    "controller/inventory/routable.py",
    "controller/localai/process_state.py",
    "controller/install/sources.py",
    "controller/install/gguf_files.py",
    "controller/install/derive.py",
    "controller/install/choose.py",
    "contract/budget.py",
    "contract/labels.py",
    "contract/hardware.py",
    "contract/manifest.py",
    "contract/sources.py",
    "gallery/yaml_items.py",
    "gallery/galleries.py",
    "gallery/backends/entries.py",
    "gallery/backends/compatibility.py",
    "gallery/backends/catalogue.py",
    "gallery/backends/variants.py",
    "gallery/backends/upgrades.py",
    "worker/hardware/capability.py",
    "worker/supervisor/states.py",
    "worker/supervisor/ports.py",
    "worker/supervisor/keys.py",
    "worker/localai/peer.py",
    "worker/localai/ranges.py",
    "worker/supervisor/environment.py",
    "blobs/transfer/range_responses.py",
    "blobs/serving/http_request.py",
    "blobs/progress.py",
    "blobs/archives/entries.py",
    "blobs/archives/tree.py",
    "blobs/oci/challenge.py",
    "blobs/oci/documents.py",
    "worker/installer/names.py",
    "inference/openai/json_body.py",
    "inference/openai/grammars.py",
    "inference/load_options.py",
    "inference/openai/messages.py",
    "inference/openai/multipart.py",
    "inference/grpc/predict_options.py",
    "inference/api_errors.py",
    "inference/grpc/replies.py",
    "inference/backend_process.py",
    "inference/openai/completion_format.py",
    "inference/openai/tool_calls.py",
    "inference/openai/transcript_format.py",
]
# Sub-packages of each package that still import each other in circles. Take an entry out when its cycles are gone.
CYCLIC: dict[str, int] = {}
IMPURE = {"asyncio", "time", "random", "os", "secrets", "socket", "subprocess", "threading", "aiohttp"}


def imports(tree: ast.AST) -> Iterator[tuple[str, bool]]:
    """Every imported module, and whether it happens when the module is loaded."""

    def walk(node: ast.AST, at_load: bool) -> Iterator[tuple[str, bool]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                yield from ((alias.name, at_load) for alias in child.names)
            elif isinstance(child, ast.ImportFrom) and child.module:
                if child.module == "corral":
                    yield from ((f"corral.{alias.name}", at_load) for alias in child.names)
                yield child.module, at_load
            inside = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            yield from walk(child, at_load and not inside)

    yield from walk(tree, True)


def package_of(name: str) -> str | None:
    parts = name.split(".")
    return parts[1] if parts[0] == "corral" and len(parts) > 1 and not parts[1].startswith("_") else None


MODULES = sorted(SOURCE.rglob("*.py"))


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_a_package_imports_only_the_packages_it_may(path: Path) -> None:
    package = path.relative_to(SOURCE).parts[0].removesuffix(".py")
    if package == "__init__":
        return
    assert package in ALLOWED, f"{package} is not a package that ALLOWED names"
    for name, at_load in imports(ast.parse(path.read_text())):
        other = package_of(name)
        if other is None or other in (package, "kit") or other in ALLOWED[package]:
            continue
        assert not at_load, f"{path.name} imports {name} when it is loaded"
        assert other in LAZY.get(package, set()), f"{path.name} imports {name}"


@pytest.mark.parametrize("name", PURE)
def test_deciding_modules_do_nothing(name: str) -> None:
    for module, _ in imports(ast.parse((SOURCE / name).read_text())):
        assert module.split(".")[0] not in IMPURE, f"{name} imports {module}"
        if module != "corral.store.records":  # types of rows, without SQL
            assert package_of(module) not in ("store", "bus"), f"{name} imports {module}"


def test_every_package_is_named() -> None:
    found = {path.name for path in SOURCE.iterdir() if path.is_dir() and any(path.glob("*.py"))}
    assert found <= set(ALLOWED)


def test_sub_packages_do_not_import_each_other_in_circles() -> None:
    """`scripts/codebase --list cycles` names the imports."""
    codebase = load_script("codebase")
    cycles = codebase.find_cycles(codebase.read_modules(ROOT))
    found = Counter(name.split(".")[0] for cycle in cycles for name in cycle)
    more = {package: count for package, count in found.items() if count > CYCLIC.get(package, 0)}
    assert not more, f"sub-packages in a cycle: {cycles}"
    assert set(found) == set(CYCLIC), "a package without cycles is still in CYCLIC: take it out"
