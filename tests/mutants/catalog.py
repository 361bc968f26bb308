"""Every mutant of a source tree by its name: the planted faults and those of the generic operators."""

from __future__ import annotations

import ast
import difflib
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from random import Random

from tests.mutants.operators import Edit, FunctionNode, SourceText, changes_of, functions_in, matching_edit

# Where generic mutants are chosen unless somebody names a module: code that decides, and that tests can run quickly.
DECIDING_PACKAGES = (
    "corral.controller.backends",
    "corral.controller.health",
    "corral.controller.inventory",
    "corral.controller.operations",
    "corral.controller.orders",
    "corral.controller.registry",
    "corral.controller.replicas",
    "corral.controller.scheduler",
)


class UnknownMutant(Exception):
    """The source has no such function, or the function no such part."""


@dataclass(frozen=True)
class PlantedFault:
    """A fault written by hand: in `function`, `put` stands where the ordinal-th `find` was."""

    name: str
    module: str  # where the function was last seen; any other module is searched when it is not there
    function: str
    find: str
    put: str
    breaks: str  # what goes wrong, for the reader
    simulated: bool = True  # the seeds of the simulation alone must notice it
    ordinal: int = 1


@dataclass(frozen=True)
class Mutant:
    name: str
    module: str
    path: Path  # relative to the root
    edit: Edit
    original: str  # the file's source

    @property
    def source(self) -> str:
        return self.edit.apply(self.original)

    @property
    def fingerprint(self) -> str:
        """Another one as soon as the mutated file is another."""
        return hashlib.sha256(self.source.encode()).hexdigest()[:16]

    def diff(self) -> str:
        lines = difflib.unified_diff(
            self.original.splitlines(keepends=True),
            self.source.splitlines(keepends=True),
            str(self.path),
            str(self.path),
            n=2,
        )
        return "".join(lines)


@dataclass(frozen=True)
class _Module:
    name: str
    path: Path
    source: str

    @cached_property
    def text(self) -> SourceText:
        return SourceText(self.source)

    @cached_property
    def functions(self) -> dict[str, FunctionNode]:
        return functions_in(ast.parse(self.source))


class Catalog:
    def __init__(self, root: Path) -> None:
        self._root = root
        self._modules: dict[str, _Module] = {}
        for path in sorted((root / "src").rglob("*.py")):
            relative = path.relative_to(root)
            name = ".".join(relative.with_suffix("").parts[1:]).removesuffix(".__init__")
            self._modules[name] = _Module(name, relative, path.read_text())

    def planted(self, fault: PlantedFault) -> Mutant:
        """Where it was last seen; else in the one place that has such a function with such a part."""
        definition = f"def {fault.function.rpartition('.')[2]}("
        found = [
            Mutant(fault.name, module.name, module.path, edit, module.source)
            for module in self._modules.values()
            if definition in module.source  # parsing them all takes a while
            and (function := module.functions.get(fault.function)) is not None
            and (edit := matching_edit(function, module.text, fault.find, fault.put, fault.ordinal)) is not None
        ]
        at_home = [mutant for mutant in found if mutant.module == fault.module]
        if len(at_home) == 1:
            return at_home[0]
        if len(found) != 1:
            where = ", ".join(mutant.module for mutant in found) or "nowhere"
            raise UnknownMutant(
                f"{fault.name}: `{fault.find}` in {fault.function}() is found {where}: "
                "change the planted fault in tests/mutants/planted.py to what the code is now"
            )
        return found[0]

    def generic(self, modules: Sequence[str] = DECIDING_PACKAGES) -> Iterator[Mutant]:
        """Of all functions in these modules and packages, in the order of the source."""
        for name, module in self._modules.items():
            if any(name == each or name.startswith(f"{each}.") for each in modules):
                for function, node in module.functions.items():
                    for change in changes_of(function, node, module.text):
                        key = f"{name}:{function}#{change.operator}.{change.ordinal}"
                        yield Mutant(key, name, module.path, change.edit, module.source)

    def choose(self, count: int, seed: int, modules: Sequence[str] = DECIDING_PACKAGES) -> list[Mutant]:
        every = list(self.generic(modules))
        return Random(seed).sample(every, min(count, len(every)))

    def named(self, key: str) -> Mutant:
        """A generic mutant by its name; the module part may be out of date if the function is in one place only."""
        module, _, rest = key.rpartition(":")
        function = rest.partition("#")[0]
        definition = f"def {function.rpartition('.')[2]}("
        candidates = [each for each in self._modules.values() if definition in each.source]
        holders = [each.name for each in candidates if function in each.functions]
        homes = [module] if module in holders else holders
        found = [each for home in homes for each in self.generic([home]) if each.name.rpartition(":")[2] == rest]
        if len(found) != 1:
            raise UnknownMutant(f"{key}: found {len(found)} times; see scripts/mutants --list --generic")
        return found[0]
