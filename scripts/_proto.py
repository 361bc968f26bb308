"""Generates the Python of `contract/backend.proto`: messages, service and the types of both.

protoc writes all but the service's types; those are written here from the descriptor, for `grpc.aio` alone, since
nothing of ours calls a backend in any other way. Run by `scripts/_proto`; `--check` compares instead of writing.
"""

from __future__ import annotations

import re
import sys
import tempfile
from pathlib import Path

from google.protobuf.descriptor_pb2 import FileDescriptorSet, MethodDescriptorProto
from grpc_tools import protoc

SOURCE = Path(__file__).parents[1] / "src"
FOLDER = Path("corral/contract")
PROTO = FOLDER / "backend.proto"
MADE = tuple(FOLDER / name for name in ("backend_pb2.py", "backend_pb2.pyi", "backend_pb2_grpc.py"))
SERVICE_TYPES = FOLDER / "backend_pb2_grpc.pyi"
# Which release of the tools wrote it is not what it says.
_VERSIONS = re.compile(r"^# Protobuf Python Version: .*$|^GRPC_GENERATED_VERSION = .*$|^    \d+,$", re.MULTILINE)


def generate(target: Path) -> dict[Path, str]:
    """Every generated file with its text, written under `target` on the way."""
    described = target / "described"
    arguments = [
        f"--python_out={target}",
        f"--pyi_out={target}",
        f"--grpc_python_out={target}",
        f"--descriptor_set_out={described}",
    ]
    if protoc.main(["protoc", f"-I{SOURCE}", *arguments, str(PROTO)]) != 0:
        sys.exit("scripts/_proto: protoc refused backend.proto")
    made = {path: (target / path).read_text() for path in MADE}
    made[SERVICE_TYPES] = service_types(FileDescriptorSet.FromString(described.read_bytes()))
    return made


def service_types(described: FileDescriptorSet) -> str:
    (service,) = described.file[0].service
    stub = "\n".join(f"    {m.name}: grpc.aio.{_callable(m)}[{_pair(m)}]" for m in service.method)
    servicer = "\n".join(_served(m) for m in service.method)
    return f'''"""Types of the service in backend.proto. Written by scripts/_proto."""

from collections.abc import AsyncIterable, AsyncIterator

import grpc
import grpc.aio

from corral.contract import backend_pb2 as pb

class {service.name}Stub:
    def __init__(self, channel: grpc.aio.Channel) -> None: ...
{stub}

class {service.name}Servicer:
{servicer}

def add_{service.name}Servicer_to_server(servicer: {service.name}Servicer, server: grpc.aio.Server) -> None: ...
'''


def _names(method: MethodDescriptorProto) -> tuple[str, str]:
    return f"pb.{method.input_type.rpartition('.')[2]}", f"pb.{method.output_type.rpartition('.')[2]}"


def _pair(method: MethodDescriptorProto) -> str:
    return ", ".join(_names(method))


def _callable(method: MethodDescriptorProto) -> str:
    asked = "Stream" if method.client_streaming else "Unary"
    answered = "Stream" if method.server_streaming else "Unary"
    return f"{asked}{answered}MultiCallable"


def _served(method: MethodDescriptorProto) -> str:
    asked, answered = _names(method)
    request = f"request_iterator: AsyncIterable[{asked}]" if method.client_streaming else f"request: {asked}"
    context = f"context: grpc.aio.ServicerContext[{_pair(method)}]"
    if method.server_streaming:
        return f"    def {method.name}(self, {request}, {context}) -> AsyncIterator[{answered}]: ..."
    return f"    async def {method.name}(self, {request}, {context}) -> {answered}: ..."


def out_of_step(made: dict[Path, str]) -> list[str]:
    def sense(text: str) -> str:
        return _VERSIONS.sub("", text)

    there = {path: (SOURCE / path).read_text() if (SOURCE / path).exists() else "" for path in made}
    return [str(path) for path, text in made.items() if sense(there[path]) != sense(text)]


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        made = generate(Path(scratch))
    if "--check" in sys.argv:
        if stale := out_of_step(made):
            sys.exit(f"not what backend.proto says: {', '.join(stale)}; run scripts/_proto")
        return
    for path, text in made.items():
        (SOURCE / path).write_text(text)


if __name__ == "__main__":
    main()
