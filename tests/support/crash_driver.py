"""A process that changes backends and is killed with -9 in the middle of it. Run by the crash tests, never by hand.

    python -m tests.support.crash_driver SCENARIO FOLDER

For the first, second, third … call that changes the disk: a child carries out the scenario and kills itself right
before that call, which is right after the one before; then this process starts an installer as a worker would, and says
what it found. One line of JSON each. It ends when a child came through without having been killed.

Faults are put in from here: what the installer runs is what everybody runs.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from corral.contract.sources import Source
from corral.kit.log import configure_logging
from corral.worker.installer.installer import Installer
from corral.worker.installer.recover import import_flat
from tests.support.installing import inline, open_installer, request

# Calls that change what is on the disk. Reading ones need no crash of their own: nothing differs around them.
CHANGING = (
    "open",
    "mkdir",
    "rename",
    "replace",
    "unlink",
    "rmdir",
    "symlink",
    "link",
    "fsync",
    "chmod",
    "utime",
    "write",
)
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT


class Killer:
    """Counts changes below a folder, and ends everything at the one it was told."""

    def __init__(self, at: int) -> None:
        self.at = at
        self.count = 0
        for name in CHANGING:
            setattr(os, name, self._wrap(name, getattr(os, name)))

    def _wrap(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if name == "open" and not (len(args) > 1 and args[1] & WRITES):
                return real(*args, **kwargs)
            self.count += 1
            if self.count == self.at:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **kwargs)

        return call


Step = Callable[[Installer], Awaitable[object]]


def tree(folder: Path, text: str) -> Source:
    """A folder with a few files, links and folders, to be copied."""
    source = folder / f"source-{text}"
    if not source.exists():
        (source / "lib").mkdir(parents=True)
        (source / "run.sh").write_text(f"#!/bin/sh\n# {text}\n")
        (source / "lib" / "data").write_bytes(text.encode() * 1000)
        (source / "lib" / "link").symlink_to("data")
    return Source("directory", str(source))


async def prepare(folder: Path, scenario: str) -> None:
    """What is there before, made undisturbed."""
    async with open_installer(folder) as (installer, _):
        if scenario == "flat":
            flat = folder / "backends" / "demo"
            flat.mkdir(parents=True)
            (flat / "run.sh").write_text("#!/bin/sh\n# old\n")
            (flat / "metadata.json").write_text('{"name": "demo", "digest": "sha256:' + "a" * 64 + '"}')
            return
        if scenario == "install":
            return
        await installer.install(request("demo", inline("older"), requested_as="meta"))
        await installer.install(request("demo", inline("old"), requested_as="meta", force=True))
        if scenario == "switch":
            await installer.fetch_aside(request("demo", tree(folder, "new"), requested_as="meta"))


def steps(folder: Path) -> dict[str, Step]:
    async def switch(installer: Installer) -> object:
        staged = [
            record
            for record in (folder / "backends/demo/versions").glob("*.json")
            if "source-new" in record.read_text()
        ]
        digest = json.loads(staged[0].read_text())["digest"] if staged else ""
        return await installer.switch("demo", digest)

    async def flat(_installer: Installer) -> object:
        return await asyncio.to_thread(import_flat, folder / "backends", "demo", (), "2026")

    return {
        "install": lambda installer: installer.install(request("demo", tree(folder, "new"), requested_as="meta")),
        "upgrade": lambda installer: installer.install(
            request("demo", tree(folder, "new"), requested_as="meta", force=True)
        ),
        "aside": lambda installer: installer.fetch_aside(request("demo", tree(folder, "new"), requested_as="meta")),
        "switch": switch,
        "rollback": lambda installer: installer.rollback("demo"),
        "delete": lambda installer: installer.delete("meta"),
        "flat": flat,
    }


def child(folder: Path, scenario: str, at: int) -> None:
    async def run() -> None:
        async with open_installer(folder, started=False) as (installer, _):
            step = steps(folder)[scenario]
            Killer(at)
            await step(installer)

    asyncio.run(run())


async def look(folder: Path) -> dict[str, Any]:
    """Start as a worker would, and say what is there."""
    async with open_installer(folder) as (installer, _):
        found = await installer.find("demo")
        files = sorted(
            str(path.relative_to(folder / "backends"))
            for path in (folder / "backends").rglob("*")
            if not path.is_symlink() or path.name == "current"
        )
        return {
            "rows": [row.name for row in await installer.list_backends()],
            "text": (found.directory / "run.sh").read_text().split()[-1] if found else "",
            "whole": (await installer.check("demo")).is_whole if found else True,
            "previous": list(found.previous) if found else [],
            "files": files,
        }


def main() -> int:
    configure_logging(role="crash", level="critical")
    scenario, folder = sys.argv[1], Path(sys.argv[2])
    template = folder / "template"
    asyncio.run(prepare(template, scenario))
    tree(template, "new")
    for at in range(1, 10_000):
        work = folder / "work"
        shutil.rmtree(work, ignore_errors=True)
        shutil.copytree(template, work, symlinks=True)
        pid = os.fork()
        if pid == 0:
            try:
                child(work, scenario, at)
            except BaseException as error:
                print(json.dumps({"failed": repr(error)}), flush=True)
                os._exit(1)
            os._exit(0)
        _, status = os.waitpid(pid, 0)
        killed = os.WIFSIGNALED(status)
        report = asyncio.run(look(work)) | {"at": at, "killed": killed}
        report["code"] = 0 if killed else os.WEXITSTATUS(status)
        print(json.dumps(report), flush=True)
        if not killed:
            break
    return 0


if __name__ == "__main__":
    sys.exit(main())
