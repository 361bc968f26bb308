"""A worker without the package `worker/localai`: `main` imports it in one place, and only when it is wanted."""

from __future__ import annotations

import ast
from pathlib import Path

WORKER = Path(__file__).parents[3] / "src" / "corral" / "worker"


def imports_localai(path: Path) -> list[bool]:
    """For each import of the package, whether it happens when the module is loaded."""
    tree = ast.parse(path.read_text())
    at_load = set(map(id, tree.body))
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("corral.worker.localai"):
            found.append(id(node) in at_load)
    return found


def test_only_main_imports_localai() -> None:
    importers = {
        str(path.relative_to(WORKER)): imports
        for path in WORKER.rglob("*.py")
        if path.parent.name != "localai" and (imports := imports_localai(path))
    }
    assert list(importers) == ["main.py"]
    assert not any(importers["main.py"]), "for type checkers, and inside a function"
