"""backend.proto is the contract's, and the Python beside it is made from it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from corral.contract import backend_pb2 as pb
from corral.contract.backend_pb2_grpc import BackendServicer

ROOT = Path(__file__).parents[3]


def test_the_generated_code_is_in_step() -> None:
    made = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "_proto.py"), "--check"], capture_output=True, text=True, check=False
    )
    assert made.returncode == 0, made.stderr


def test_a_changed_proto_is_noticed(tmp_path: Path) -> None:
    """The check above can fail: the same script over a copy with one number changed says so."""
    scripts, source = tmp_path / "scripts", tmp_path / "src" / "corral" / "contract"
    for folder in (scripts, source):
        folder.mkdir(parents=True)
    (scripts / "_proto.py").write_text((ROOT / "scripts" / "_proto.py").read_text())
    for path in (ROOT / "src" / "corral" / "contract").glob("backend*"):
        (source / path.name).write_text(path.read_text())
    proto = source / "backend.proto"
    proto.write_text(proto.read_text().replace("string ModelIdentity = 54;", "string ModelIdentity = 55;"))
    made = subprocess.run(
        [sys.executable, str(scripts / "_proto.py"), "--check"], capture_output=True, text=True, check=False
    )
    assert made.returncode == 1
    assert "backend_pb2.py" in made.stderr


@pytest.mark.parametrize(
    ("message", "field", "number"),
    [
        ("Reply", "message", 1),
        ("Reply", "chat_deltas", 8),
        ("Result", "success", 2),
        ("ModelOptions", "Model", 1),
        ("ModelOptions", "ContextSize", 2),
        ("ModelOptions", "ModelFile", 21),
        ("ModelOptions", "ModelPath", 59),
        ("ModelOptions", "Options", 62),
        ("ModelOptions", "EnableScore", 75),
        ("PredictOptions", "Prompt", 1),
        ("PredictOptions", "Embeddings", 36),
        ("PredictOptions", "Messages", 44),
        ("PredictOptions", "Metadata", 52),
        ("PredictOptions", "ModelIdentity", 54),
        ("Message", "tool_calls", 6),
        ("EmbeddingResult", "layout", 5),
        ("TranscriptRequest", "dst", 2),
        ("SoundGenerationRequest", "instrumental", 17),
        ("GenerateImageRequest", "step", 4),
        ("ToolFormatMarkers", "reasoning_start", 20),
    ],
)
def test_names_and_numbers_are_the_contract_s(message: str, field: str, number: int) -> None:
    assert pb.DESCRIPTOR.message_types_by_name[message].fields_by_name[field].number == number


def test_the_service_is_called_as_localai_s() -> None:
    service = pb.DESCRIPTOR.services_by_name["Backend"]
    assert service.full_name == "backend.Backend"
    for name in ("Health", "Free", "LoadModel", "Predict", "PredictStream", "Embedding", "TokenizeString", "Status"):
        assert name in service.methods_by_name
        assert hasattr(BackendServicer, name)


def test_states_and_layouts() -> None:
    assert dict(pb.StatusResponse.State.items()) == {"UNINITIALIZED": 0, "BUSY": 1, "READY": 2, "ERROR": -1}
    assert pb.EMBEDDING_LAYOUT_FINAL == 1
    assert pb.EMBEDDING_LAYOUT_PER_TOKEN == 2
