"""Which test files may notice a change of a module, the likeliest first, from what they import."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from pathlib import Path

_ROOTS = {"src": "corral", "tests": "tests"}


class ImportGraph:
    def __init__(self, root: Path) -> None:
        self._root = root
        paths = [path for folder in _ROOTS for path in sorted((root / folder).rglob("*.py"))]
        self._names = {_module_name(path.relative_to(root)): path for path in paths}
        self._imports = {name: _imported(path, self._names) for name, path in self._names.items()}

    def tests_of(self, module: str, kind: str, *, max_distance: int) -> list[Path]:
        """Test files of one kind, relative to the root. Distance 0: the file, or its test support, imports the module
        itself; 1: it imports one that does."""
        users = {module}
        ranked: dict[str, int] = {}
        for distance in range(max_distance + 1):
            for name in self._names:
                if _is_test(name, kind) and name not in ranked and self._with_support(name) & users:
                    ranked[name] = distance
            users |= {name for name, imports in self._imports.items() if name.startswith("corral.") and imports & users}
        own_folder = f"tests.{kind}.{module.split('.')[-2]}." if module.count(".") > 1 else ""
        for name in self._names:
            if own_folder and name.startswith(own_folder) and _is_test(name, kind):
                ranked.setdefault(name, max_distance)
        order = sorted(ranked, key=lambda name: (ranked[name], not name.startswith(own_folder or "-"), name))
        return [self._names[name].relative_to(self._root) for name in order]

    def _with_support(self, test: str) -> set[str]:
        """What it imports, also by way of what tests share."""
        seen: set[str] = set()
        waiting = [test]
        while waiting:
            for name in self._imports.get(waiting.pop(), ()):
                if name not in seen:
                    seen.add(name)
                    if name.startswith("tests."):
                        waiting.append(name)
        return seen


def _is_test(name: str, kind: str) -> bool:
    return name.startswith(f"tests.{kind}.") and name.rpartition(".")[2].startswith("test_")


def _module_name(path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join(parts[1:] if parts[0] == "src" else parts).removesuffix(".__init__")


def _imported(path: Path, known: Mapping[str, Path]) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.update({node.module, *(f"{node.module}.{alias.name}" for alias in node.names)})
    return found & known.keys()
