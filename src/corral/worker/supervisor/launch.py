"""From a process spec to a command: arguments, environment, user. Reads the disk, starts no process."""

from __future__ import annotations

import os
import shutil
import socket
import sys
from collections.abc import Mapping
from pathlib import Path

import corral
from corral.contract.manifest import FROM_DEFINITION, Placeholders, fill_command, fill_environment
from corral.kit.errors import Failed, Invalid
from corral.worker.settings.processes import ProcessSettings
from corral.worker.supervisor.environment import PYTHON, TOKEN, device_list, inherit, visible_devices
from corral.worker.supervisor.spec import LOOPBACK, ProcessSpec, ShimRun
from corral.worker.system.users import BackendUser, User, find_closed_folder, find_user

_CACHES = ("HF_HOME", "HUGGINGFACE_HUB_CACHE", "TRANSFORMERS_CACHE")


def plan_run(
    spec: ProcessSpec,
    process_id: str,
    port: int,
    token: str,
    settings: ProcessSettings,
    environ: Mapping[str, str],
    *,
    backend_user: BackendUser,
) -> ShimRun:
    """Raises Failed for a command that does not exist, Invalid for an impossible one."""
    values = Placeholders(
        **{name: value for name, value in spec.words.items() if name in FROM_DEFINITION},
        host=spec.listen_host,
        port=port,
        model_name=spec.model,
        model_file=spec.model_file,
        model_dir=spec.model_dir,
        context_size=spec.context_size,
        devices=device_list(spec.devices),
        device_count=len(spec.devices),
        slots=spec.slots or spec.manifest.slots,
        backend_dir=spec.directory,
    )
    words = fill_command(spec.manifest.command, values)
    if not words:
        raise Invalid(f"the manifest of {spec.backend} has no command")
    directory = Path(spec.directory)
    if not directory.is_dir():
        raise Failed(f"{spec.backend} is not installed any more: there is no folder {directory}")
    user, home = find_user(backend_user.name)
    env = inherit(environ, settings.backend_env) | home
    if user is not None and backend_user.home is not None:
        env["HOME"] = str(backend_user.home)
        env.pop("XDG_CACHE_HOME", None)  # the worker's
    env |= {"PYTHONUNBUFFERED": "1", PYTHON: sys.executable}
    env |= _places(spec, directory, env)
    env |= fill_environment(spec.manifest.env, values)
    env |= visible_devices(spec.devices)
    env |= spec.env
    env[TOKEN] = token  # last: neither manifest nor definition may set it
    program = find_program(words[0], directory, env.get("PATH", os.defpath))
    if user is not None and program == sys.executable:
        _check_own_python(spec.backend, user)
    return ShimRun(
        process_id=process_id,
        command=(program, *words[1:]),
        env=env,
        directory=str(directory),
        log_bytes=settings.backend_log_bytes,
        log_files=settings.backend_log_files,
        grace_s=float(settings.backend_grace_s),  # a plain number, as the shim's file needs it
        user=user,
    )


def _places(spec: ProcessSpec, directory: Path, env: Mapping[str, str]) -> dict[str, str]:
    """Where the build's own programs, the models and its Vulkan drivers are
    (docs/reference/wire/grpc.md#starting-a-process)."""
    places = {}
    own = directory / "venv" / "bin"
    if own.is_dir():
        places["PATH"] = f"{own}{os.pathsep}{env.get('PATH', os.defpath)}"
    if spec.model_dir:
        places |= {name: spec.model_dir for name in _CACHES if name not in env}
    if drivers := sorted(directory.glob("vulkan/icd.d/*.json")):
        listed = os.pathsep.join(map(str, drivers))
        places |= {"VK_DRIVER_FILES": listed, "VK_ICD_FILENAMES": listed}
    return places


def find_program(word: str, directory: Path, path: str) -> str:
    """The program of a command, as the manifest describes it. `python` is the worker's own interpreter where the build
    has none."""
    candidates = [directory / word] if "/" in word else [directory / "venv" / "bin" / word, directory / word]
    for candidate in candidates:
        if candidate.is_file():
            return str(_executable(candidate))
    if "/" not in word:
        if word in ("python", "python3"):
            return sys.executable
        if (found := shutil.which(word, path=path)) is not None:
            return found
    raise Failed(f"there is no {word} in {directory}" + ("" if "/" in word else " nor on the PATH"))


def _check_own_python(backend: str, user: User) -> None:
    """Raises Failed where this user cannot read the worker's interpreter or its packages."""
    for place in (Path(sys.executable).parent, Path(corral.__file__).parent):
        if (closed := find_closed_folder(place, user)) is not None:
            raise Failed(
                f"{backend} runs with the worker's own Python, and user {user.uid}, which backends run as, cannot "
                f"enter {closed}: install Corral elsewhere (in /opt), or open that folder (chmod o+x {closed}), or "
                "start the worker with --backend-user root if you trust this backend"
            )


def _executable(program: Path) -> Path:
    """Make a run file executable: archives may lose the mode bits (docs/reference/wire/grpc.md#starting-a-process)."""
    mode = program.stat().st_mode
    if not mode & 0o111 and not program.is_symlink():  # a backend may have written into its folder since
        try:
            program.chmod(mode | 0o500)
        except OSError as error:
            raise Failed(f"{program} cannot be executed: {error.strerror}") from error
    return program


def is_port_free(port: int, host: str = LOOPBACK) -> bool:
    """Whether a process could listen on the port now. Closed connections in TIME_WAIT do not count."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True
