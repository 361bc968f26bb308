"""Runs the steps of a Dockerfile without Docker: on a minimal Debian, in the order of the file.

Only what our Dockerfile uses is understood; anything else fails. `scripts/_bare_machine` makes the Debian and gives
each step mounts and processes of its own. Layers, caches and the registry of base images are not emulated.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
from dataclasses import dataclass, field, replace
from pathlib import Path

ROOT = Path(__file__).parents[2]
BASE = "debian:bookworm-slim"  # what scripts/_bare_machine makes
STEP_S = 900.0  # packages come over the network


@dataclass(frozen=True)
class Step:
    keyword: str
    text: str


@dataclass(frozen=True)
class Healthcheck:
    command: tuple[str, ...]
    interval_s: float = 30
    timeout_s: float = 30
    start_period_s: float = 0
    retries: int = 3


@dataclass(frozen=True)
class Stage:
    """What a stage says of its containers, with what it took over from the stage below."""

    name: str
    base: str
    steps: tuple[Step, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    user: str = "root"
    entrypoint: tuple[str, ...] = ()
    command: tuple[str, ...] = ()
    ports: tuple[int, ...] = ()
    healthcheck: Healthcheck | None = None


def parse_dockerfile(text: str) -> dict[str, Stage]:
    """Name → stage, in the order of the file; the last is what `docker build` makes."""
    stages: dict[str, Stage] = {}
    current: Stage | None = None
    for step in _steps(text):
        if step.keyword == "FROM":
            found = re.fullmatch(r"(\S+) AS (\S+)", step.text)
            assert found, f"a stage has a name: FROM {step.text}"
            below = stages.get(found[1]) or Stage("", found[1])
            current = replace(below, name=found[2], base=found[1], steps=())
        else:
            assert current is not None, "the first step is FROM"
            current = _with(current, step)
        stages[current.name] = current
    return stages


def _steps(text: str) -> list[Step]:
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    return [Step(*line.split(maxsplit=1)) for line in joined.splitlines() if line.strip()]


def _with(stage: Stage, step: Step) -> Stage:
    text = step.text
    match step.keyword:
        case "RUN" | "COPY":
            return replace(stage, steps=(*stage.steps, step))
        case "ENV":
            given = dict(word.split("=", 1) for word in shlex.split(text))
            return replace(stage, env=stage.env | given)
        case "USER":
            return replace(stage, user=text)
        case "ENTRYPOINT":
            return replace(stage, entrypoint=tuple(json.loads(text)), command=())
        case "CMD":
            return replace(stage, command=tuple(json.loads(text)))
        case "EXPOSE":
            return replace(stage, ports=(*stage.ports, *map(int, text.split())))
        case "HEALTHCHECK":
            options, _, command = text.partition("CMD ")
            given = dict(word.removeprefix("--").split("=", 1) for word in options.split())
            return replace(stage, healthcheck=_healthcheck(tuple(json.loads(command)), given))
        case other:
            raise AssertionError(f"{other} is not understood here: add it to tests/support/dockerfile.py")


def _healthcheck(command: tuple[str, ...], given: dict[str, str]) -> Healthcheck:
    known = {"interval": "interval_s", "timeout": "timeout_s", "start-period": "start_period_s", "retries": "retries"}
    assert given.keys() <= known.keys(), given
    return Healthcheck(command, **{known[name]: int(text.removesuffix("s")) for name, text in given.items()})


class ImageBuilder:
    """Builds stages into folders below `folder`, each once."""

    def __init__(self, dockerfile: Path, context: Path, folder: Path) -> None:
        self.stages = parse_dockerfile(dockerfile.read_text())
        ignore = dockerfile.with_name(dockerfile.name + ".dockerignore")
        self._ignored = _unignored(ignore) if ignore.exists() else set()
        self._context = context
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def build(self, name: str) -> Path:
        """The root of the file system of this stage."""
        root = self._folder / name
        if root.exists():
            return root
        stage = self.stages[name]
        below = self._base() if stage.base == BASE else self.build(stage.base)
        partial = self._folder / f"{name}.partial"
        subprocess.run(["cp", "-a", "--reflink=auto", below, partial], check=True)
        for step in stage.steps:
            match step.keyword:
                case "RUN":
                    self._run(partial, step.text, stage.env)
                case "COPY":
                    self._copy(partial, step.text)
        self._remove_checkout(partial)
        partial.rename(root)
        return root

    def _base(self) -> Path:
        """As little as the slim image has: no Python, no certificates."""
        root = self._folder / "debian"
        if not root.exists():
            self._bare_machine(root, "true", BARE_PACKAGES="")
            self._remove_checkout(root)
        return root

    def _run(self, root: Path, script: str, env: dict[str, str]) -> None:
        # `sh -e` is not what Docker does: a step must fail by itself.
        self._bare_machine(root, *("env", *(f"{name}={value}" for name, value in env.items()), "sh", "-c", script))

    def _bare_machine(self, root: Path, *command: str, **env: str) -> None:
        ran = subprocess.run(
            [ROOT / "scripts" / "_bare_machine", root, "env", "--chdir=/", *command],
            env={**os.environ, **env},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=STEP_S,
        )
        assert ran.returncode == 0, f"{' '.join(command)}\n{ran.stdout[-3000:]}\n{ran.stderr[-3000:]}"

    @staticmethod
    def _remove_checkout(root: Path) -> None:
        shutil.rmtree(root / "corral", ignore_errors=True)

    def _copy(self, root: Path, text: str) -> None:
        words = text.split()
        if words[0].startswith("--from="):
            stage = words.pop(0).removeprefix("--from=")
            (source, target) = words
            assert (self.build(stage) / source.lstrip("/")).is_dir()
            place = root / target.lstrip("/")
            place.parent.mkdir(parents=True, exist_ok=True)
            subprocess.run(["cp", "-a", self.build(stage) / source.lstrip("/"), place], check=True)
            return
        (pattern, target) = words
        assert target.endswith("/")
        assert pattern in self._ignored, f".dockerignore keeps {pattern} out of the context"
        found = sorted(self._context.glob(pattern))
        assert found, f"COPY {pattern}: no such file in {self._context}"
        (root / target.lstrip("/")).mkdir(parents=True, exist_ok=True)
        for each in found:
            shutil.copy(each, root / target.lstrip("/"))


def _unignored(path: Path) -> set[str]:
    """What a .dockerignore that begins with `*` lets in again."""
    first, *rest = path.read_text().split()
    assert first == "*"
    assert all(line.startswith("!") for line in rest)
    return {line[1:] for line in rest}
