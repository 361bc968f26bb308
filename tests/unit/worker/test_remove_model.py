"""Removing the staged files of a model."""

from __future__ import annotations

from pathlib import Path

import pytest

from corral.kit.errors import Failed, Invalid
from corral.worker.files.model_files import remove_model


def test_removing_a_model_leaves_its_neighbours(tmp_path: Path) -> None:
    for name in ("m", "m.yaml", "m.gguf", "mm", "m-2.gguf"):
        (tmp_path / name).write_text("1")
    (tmp_path / "m.d").mkdir()
    remove_model(tmp_path, "m")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m-2.gguf", "m.d", "mm"]
    remove_model(tmp_path, "absent")


def test_removing_a_link_removes_the_link(tmp_path: Path) -> None:
    models, kept = tmp_path / "models", tmp_path / "kept"
    models.mkdir()
    kept.mkdir()
    (kept / "file").write_text("1")
    (models / "m").symlink_to(kept)
    (models / "way").symlink_to(tmp_path)
    remove_model(models, "m")
    assert (kept / "file").exists()
    assert not (models / "m").is_symlink()
    with pytest.raises(Invalid):
        remove_model(models, "way/kept")
    assert (kept / "file").exists()


@pytest.mark.parametrize("name", ["", " ", ".", "..", "../x", "a/../..", "/", "\0"])
def test_names_that_lead_elsewhere(tmp_path: Path, name: str) -> None:
    with pytest.raises((Invalid, Failed)):
        remove_model(tmp_path / "models", name)
