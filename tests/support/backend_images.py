"""The mock backend as an image for two platforms, the gallery that names it, and a bad line for tests without a loop.

push_image(registry.url, "demo/mock", "1", mock_image("1"))
env = gallery_of(tmp_path / "galleries", openai_entry("farm", f"oci://{line.host}/demo/mock:1"))
with line_to(registry.port) as line:
    line.bytes_per_s = 200_000
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.support.bad_line import Line
from tests.support.image_registry import MadeImage, layer, make_image
from tests.support.supervising import MOCK

PLATFORMS = ("linux/amd64", "linux/arm64")
MANIFEST = {
    "protocol": "openai",
    "command": ["python", "-B", "mock.py", "--http", "{host}:{port}", "--model", "{model_name}"],
    "ready": {"path": "/health", "timeout_s": 60},
    "slots": 4,
    "devices": "none",
}


def mock_image(
    version: str = "1", *, platforms: Sequence[str] = PLATFORMS, noise_bytes: int = 0, program_text: str = ""
) -> MadeImage:
    """It says `version` first when it answers. Noise is what a line takes time for; it does not pack. Which platform a
    node took is told by the file PLATFORM. `program_text` is run instead of the mock."""
    program: dict[str, bytes | str | None] = {
        path.name: path.read_bytes() for path in sorted(MOCK.iterdir()) if path.is_file() and path.name != "VERSION"
    }
    if program_text:
        program["mock.py"] = program_text.encode()
    noise: dict[str, bytes | str | None] = {}
    if noise_bytes:
        noise["noise"] = random.Random(version).randbytes(noise_bytes)

    def layers(platform: str) -> list[bytes]:
        about = {"VERSION": f"{version}\n".encode(), "PLATFORM": f"{platform}\n".encode()}
        return [layer(program), layer(about | noise)]

    return make_image({platform: layers(platform) for platform in platforms})


def openai_entry(name: str, uri: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "uri": uri, "license": "apache-2.0", "corral": MANIFEST} | more


def gallery_of(folder: Path, *entries: dict[str, Any]) -> dict[str, str]:
    """The settings of a fleet that has this gallery besides the built-in one. Call it again to change what it says."""
    folder.mkdir(parents=True, exist_ok=True)
    index = folder / "index.yaml"
    index.write_text(json.dumps(entries))  # JSON is YAML
    return {
        "CORRAL_GALLERIES": json.dumps([{"name": "farm", "url": index.as_uri()}]),
        "CORRAL_GALLERY_FOLDER": str(folder),
        "CORRAL_GALLERY_FRESH": "100ms",
    }


class SteadyLine:
    """`Line` on a loop and thread of its own."""

    def __init__(self, target_port: int, loop: asyncio.AbstractEventLoop) -> None:
        self.line = Line(target_port)
        self._loop = loop

    @property
    def host(self) -> str:
        return self.line.host

    @property
    def passed(self) -> int:
        """Bytes that came back."""
        return self.line.passed

    @property
    def open_connections(self) -> int:
        return self.line.open_connections

    def at(self, bytes_per_s: float) -> None:
        """0: as fast as it goes. Connections made from now on."""
        self.line.bytes_per_s = bytes_per_s

    def cut_after(self, *sizes: int) -> None:
        """The next connections break after so many bytes that came back, one each."""
        self.line.cut_after = [*sizes]

    def up(self) -> None:
        self._do(self.line.up())

    def down(self) -> None:
        self._do(self.line.down())

    def close(self) -> None:
        self._do(self.line.close())

    def _do(self, work: Any) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout=30)


@contextlib.contextmanager
def line_to(target_port: int) -> Iterator[SteadyLine]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="line", daemon=True)
    thread.start()
    line = SteadyLine(target_port, loop)
    try:
        line.up()
        yield line
    finally:
        line.close()
        loop.call_soon_threadsafe(loop.stop)
        thread.join(timeout=30)
        loop.close()
