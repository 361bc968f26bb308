"""From a manifest to the words that are run."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from corral.contract.codec import decode, encode
from corral.contract.manifest import LOCALAI, Manifest
from corral.kit.errors import Failed
from corral.worker.settings.processes import ProcessSettings
from corral.worker.supervisor import launch
from corral.worker.supervisor.launch import find_program, plan_run
from corral.worker.supervisor.spec import ProcessSpec, Record, ShimRun, load_timeout_s
from corral.worker.system.users import BackendUser, User, find_user

GIB = 1024**3


def script(path: Path, mode: int = 0o755) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n")
    path.chmod(mode)
    return path


def planned(folder: Path, manifest: Manifest, environ: dict[str, str] | None = None, **told: Any) -> ShimRun:
    spec = ProcessSpec(backend="b", directory=str(folder), manifest=manifest, **told)
    paths = {"PATH": "/usr/bin:/bin"} | (environ or {})
    return plan_run(spec, "p1", 20007, "secret", ProcessSettings(), paths, backend_user=BackendUser())


def test_without_a_manifest_it_is_localai_s(tmp_path: Path) -> None:
    run = script(tmp_path / "run.sh")
    made = planned(tmp_path, LOCALAI)
    assert made.command == (str(run), "--addr", "127.0.0.1:20007")
    assert made.directory == str(tmp_path)
    assert made.env["LOCALAI_GRPC_AUTH_TOKEN"] == "secret"


def test_for_a_localai_controller_it_listens_everywhere(tmp_path: Path) -> None:
    script(tmp_path / "run.sh")
    made = planned(tmp_path, LOCALAI, listen_host="0.0.0.0")
    assert made.command[1:] == ("--addr", "0.0.0.0:20007")


def test_placeholders_are_filled_in_words_and_environment(tmp_path: Path) -> None:
    script(tmp_path / "serve")
    manifest = Manifest(
        protocol="openai",
        command=("serve", "--port", "{port}", "--model", "{model_file}", "--ctx", "{context_size}", "--np", "{slots}"),
        env={"WHERE": "{backend_dir}", "UNSAID": "{devices}"},
        slots=4,
    )
    made = planned(tmp_path, manifest, model_file="/models/x.gguf")
    assert made.command[1:] == ("--port", "20007", "--model", "/models/x.gguf", "--np", "4")
    assert made.env["WHERE"] == str(tmp_path)
    assert "UNSAID" not in made.env


def test_later_words_on_the_environment_win_but_not_over_the_token(tmp_path: Path) -> None:
    script(tmp_path / "run.sh")
    manifest = Manifest(protocol="grpc", command=("./run.sh",), env={"A": "manifest", "B": "manifest"})
    told = {"A": "definition", "LOCALAI_GRPC_AUTH_TOKEN": "known"}
    made = planned(tmp_path, manifest, environ={"LANG": "C", "CORRAL_X": "1"}, env=told)
    assert (made.env["A"], made.env["B"], made.env["LANG"]) == ("definition", "manifest", "C")
    assert made.env["LOCALAI_GRPC_AUTH_TOKEN"] == "secret"
    assert "CORRAL_X" not in made.env


def test_the_first_word_is_looked_for_at_home_first(tmp_path: Path) -> None:
    assert find_program("sh", tmp_path, "/usr/bin:/bin") in ("/bin/sh", "/usr/bin/sh")
    at_home = script(tmp_path / "sh")
    assert find_program("sh", tmp_path, "/usr/bin:/bin") == str(at_home)
    in_its_venv = script(tmp_path / "venv" / "bin" / "sh")
    assert find_program("sh", tmp_path, "/usr/bin:/bin") == str(in_its_venv)
    assert find_program("./sh", tmp_path, "/usr/bin:/bin") == str(tmp_path / "sh")
    assert find_program("/bin/sh", tmp_path, "") == "/bin/sh"


def test_python_is_the_worker_s_own_unless_the_build_brings_one(tmp_path: Path) -> None:
    assert find_program("python", tmp_path, "/usr/bin:/bin") == sys.executable
    own = script(tmp_path / "venv" / "bin" / "python")
    assert find_program("python", tmp_path, "/usr/bin:/bin") == str(own)
    made = planned(tmp_path, Manifest(protocol="openai", command=("python", "x.py")))
    assert made.command[0] == str(own)
    assert made.env["PATH"] == f"{own.parent}:/usr/bin:/bin"
    assert made.env["CORRAL_PYTHON"] == sys.executable


def test_a_run_file_nobody_can_execute_is_made_so(tmp_path: Path) -> None:
    script(tmp_path / "run.sh", 0o644)
    planned(tmp_path, LOCALAI)
    assert os.stat(tmp_path / "run.sh").st_mode & 0o777 == 0o744


def test_models_and_drivers_are_where_libraries_look(tmp_path: Path) -> None:
    script(tmp_path / "run.sh")
    driver = script(tmp_path / "vulkan" / "icd.d" / "radv.json")
    made = planned(tmp_path, LOCALAI, environ={"HF_HOME": "/mine"}, model_dir="/models")
    assert made.env["HF_HOME"] == "/mine"
    assert made.env["TRANSFORMERS_CACHE"] == made.env["HUGGINGFACE_HUB_CACHE"] == "/models"
    assert made.env["VK_ICD_FILENAMES"] == made.env["VK_DRIVER_FILES"] == str(driver)


def test_a_missing_program_is_told(tmp_path: Path) -> None:
    with pytest.raises(Failed, match=r"there is no \./run\.sh in "):
        planned(tmp_path, LOCALAI)
    with pytest.raises(Failed, match="nor on the PATH"):
        find_program("no-such-thing", tmp_path, "/usr/bin")


def test_the_worker_s_own_user_needs_no_change() -> None:
    assert find_user("") == (None, {})


@pytest.mark.parametrize(("weights", "seconds"), [(0, 300), (GIB, 320), (100 * GIB, 2300), (10**15, 6 * 3600)])
def test_loading_gets_time_by_the_size_of_the_weights(weights: int, seconds: float) -> None:
    assert load_timeout_s(weights) == seconds


def test_a_record_survives_the_disk(tmp_path: Path) -> None:
    script(tmp_path / "run.sh")
    spec = ProcessSpec(backend="b", directory=str(tmp_path), model="m", replica=2, env={"A": "b"}, slots=3)
    run = plan_run(spec, "p1", 20007, "secret", ProcessSettings(), {}, backend_user=BackendUser())
    record = Record(run=run, process=spec, port=20007, token="secret", restarts=1)
    assert decode(Record, encode(record)) == record
    record.write(tmp_path)
    assert Record.read(tmp_path) == record
    assert os.stat(tmp_path / "spec.json").st_mode & 0o777 == 0o600
    (tmp_path / "spec.json").write_text("{")
    assert Record.read(tmp_path) is None


def test_the_workers_own_python_below_a_closed_folder_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a backend that brings none would choose to run as root."""
    (tmp_path / "build").mkdir()
    closed = tmp_path / "closed"
    script(closed / "bin" / "python")
    closed.chmod(0o700)
    somebody = User(uid=tmp_path.stat().st_uid + 64100, gid=64100, groups=())
    monkeypatch.setattr(sys, "executable", str(closed / "bin" / "python"))
    monkeypatch.setattr(launch, "find_user", lambda _: (somebody, {}))
    with pytest.raises(Failed, match=r"cannot enter .*: install Corral elsewhere .*--backend-user root"):
        planned(tmp_path / "build", Manifest(command=("python", "x.py")))
    own = script(tmp_path / "build" / "venv" / "bin" / "python")
    assert planned(tmp_path / "build", Manifest(command=("python", "x.py"))).command[0] == str(own)
