"""Runs on a machine that joins, from the installer, before anything is installed there: the standard library only.

Fetches the wheel of Corral and the wheels of its dependencies from the controller, and checks the SHA-256 of each.
Writes them and requirements.txt into a folder. Exit status: 0 all are there; 3 the controller cannot provide the
dependencies; 1 an error, explained on standard error.
"""

from __future__ import annotations

import hashlib
import hmac
import http.client
import json
import os
import platform
import re
import ssl
import sys
import time
import urllib.error
import urllib.request
import zipfile
from pathlib import Path
from typing import Any, NoReturn

TIMEOUT_S = 60.0
WAIT_S = 300.0  # for the controller to find out which packages this machine needs
PAUSE_S = float(os.environ.get("CORRAL_INSTALL_PAUSE", "2"))
TRIES = int(os.environ.get("CORRAL_INSTALL_TRIES", "5"))
CHUNK = 1 << 18
LOCKS = ("corral/_requirements.txt", "corral/_pip.txt")


def say(text: str) -> None:
    print(f"corral: {text}", file=sys.stderr, flush=True)


def fail(text: str) -> NoReturn:
    say(text)
    sys.exit(1)


class Controller:
    def __init__(self, url: str, ca: str, token: str) -> None:
        self.url = url
        self._headers = {"Authorization": f"Bearer {token}"}
        self._context: ssl.SSLContext | None = None
        if url.startswith("https:"):
            self._context = self._trust(ca) if ca else None

    def _trust(self, ca: str) -> ssl.SSLContext:
        if ca.startswith("sha256:"):
            context = ssl.create_default_context(cadata=self._pinned_ca(ca))
        else:
            try:
                context = ssl.create_default_context(cafile=ca)
            except OSError as error:
                fail(f"--ca: {ca} cannot be used: {error}")
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # what is pinned may be no CA
        return context

    def _pinned_ca(self, ca: str) -> str:
        """The certificate is fetched without verification: only the one with the known fingerprint is trusted."""
        unverified = ssl.create_default_context()
        unverified.check_hostname = False
        unverified.verify_mode = ssl.CERT_NONE
        with self._open(f"{self.url}/ca.pem", {}, unverified) as answer:
            pem = answer.read(1 << 18).decode("ascii", "replace")
        for each in re.findall("-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", pem, re.DOTALL):
            found = hashlib.sha256(ssl.PEM_cert_to_DER_cert(each)).hexdigest()
            if hmac.compare_digest(found, ca.removeprefix("sha256:")):
                return str(each)
        fail(f"the CA certificate of {self.url} is not the one of this installer: another machine answers in its place")

    def get(self, path: str) -> http.client.HTTPResponse:
        """Repeats what may pass. Raises HTTPError for an answer that a repetition does not change."""
        for attempt in range(1, TRIES + 1):
            try:
                return self._open(self.url + path, self._headers, self._context)
            except urllib.error.HTTPError as error:
                if error.code < 500 or attempt == TRIES:
                    raise
            except OSError as error:
                if attempt == TRIES:
                    fail(f"{self.url} cannot be reached: {getattr(error, 'reason', error)}")
            time.sleep(PAUSE_S)
        raise AssertionError

    def _open(self, url: str, headers: dict[str, str], context: ssl.SSLContext | None) -> http.client.HTTPResponse:
        request = urllib.request.Request(url, headers=headers)
        # Without a proxy, as the worker connects too.
        handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({})]
        if context is not None:
            handlers.append(urllib.request.HTTPSHandler(context=context))
        answer: http.client.HTTPResponse = urllib.request.build_opener(*handlers).open(request, timeout=TIMEOUT_S)
        return answer


def reason(error: urllib.error.HTTPError) -> str:
    try:
        body: Any = json.loads(error.read())
        message = body["error"]
        return str(message["message"] if isinstance(message, dict) else message)
    except (ValueError, KeyError, TypeError, OSError):
        return f"HTTP {error.code}"


def download(controller: Controller, name: str, sha256: str, folder: Path) -> int:
    """Fetch a wheel unless it is there. Returns its size."""
    if "/" in name or "\\" in name or not name.endswith(".whl"):
        fail(f"the controller names a package {name!r}")
    path = folder / name
    if path.exists() and hashlib.sha256(path.read_bytes()).hexdigest() == sha256:
        return path.stat().st_size
    for attempt in range(1, TRIES + 1):
        partial, received = folder / f"{name}.part", hashlib.sha256()
        try:
            with controller.get(f"/install/wheels/{sha256}") as answer, partial.open("wb") as file:
                while chunk := answer.read(CHUNK):
                    received.update(chunk)
                    file.write(chunk)
        except urllib.error.HTTPError as error:
            fail(f"{name}: {reason(error)}")
        except (OSError, http.client.HTTPException) as error:
            if getattr(error, "errno", None) == 28:
                fail(f"the disk is full: free some space, or choose another folder ({folder.parent})")
            say(f"{name}: {error}; trying again")
        if received.hexdigest() == sha256:
            os.replace(partial, path)
            return path.stat().st_size
        if attempt < TRIES:
            time.sleep(PAUSE_S)
    fail(f"{name} arrived {TRIES} times with another SHA-256 than {sha256}: nothing was installed")


def list_wheels(controller: Controller) -> list[dict[str, Any]] | None:
    """None where the controller cannot provide them."""
    machine = {"x86_64": "amd64", "amd64": "amd64", "aarch64": "arm64", "arm64": "arm64"}.get(
        platform.machine().lower()
    )
    system = {"linux": "linux", "darwin": "darwin"}.get(sys.platform)
    if machine is None or system is None:
        fail(f"Corral has no packages for {platform.system()} on {platform.machine()}")
    python = f"{sys.version_info[0]}.{sys.version_info[1]}"
    deadline = time.monotonic() + WAIT_S
    try:
        while True:
            with controller.get(f"/install/wheels?platform={system}/{machine}&python={python}") as answer:
                listed: dict[str, Any] = json.loads(answer.read())
            if listed["ready"]:
                found: list[dict[str, Any]] = listed["wheels"]
                return found
            if time.monotonic() > deadline:
                say("the controller is still looking for the packages: the package index is asked instead")
                return None
            time.sleep(PAUSE_S)
    except urllib.error.HTTPError as error:
        if error.code in (401, 403):
            fail(reason(error))
        say(f"the controller cannot provide the packages ({reason(error)}): the package index is asked instead")
        return None


def main(url: str, ca: str, own_name: str, own_sha256: str, target: str) -> int:
    folder = Path(target)
    folder.mkdir(parents=True, exist_ok=True)
    controller = Controller(url, ca, sys.stdin.read().strip())
    download(controller, own_name, own_sha256, folder)
    with zipfile.ZipFile(folder / own_name) as archive:
        pinned = "".join(archive.read(each).decode() for each in LOCKS)
    (folder / "requirements.txt").write_text(
        f"corral @ {(folder / own_name).as_uri()} --hash=sha256:{own_sha256}\n{pinned}"
    )
    wheels = list_wheels(controller)
    if wheels is None:
        return 3
    locked = set(re.findall(r"--hash=sha256:([0-9a-f]{64})", pinned))
    received = 0
    for number, wheel in enumerate(wheels, 1):
        if wheel["sha256"] not in locked:
            fail(f"{wheel['name']} is not among the locked packages: nothing was installed")
        received += download(controller, wheel["name"], wheel["sha256"], folder)
        if sys.stderr.isatty():
            shown = f"corral: {number} of {len(wheels)} packages, {received >> 20} MiB"
            print(f"\r{shown}", end="\n" if number == len(wheels) else "", file=sys.stderr, flush=True)
    if not sys.stderr.isatty():
        say(f"{len(wheels)} packages, {received >> 20} MiB")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(*sys.argv[1:]))
    except urllib.error.HTTPError as error:
        fail(f"{error.url}: {reason(error)}")
    except KeyboardInterrupt:
        sys.exit(130)
