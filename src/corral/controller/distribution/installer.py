"""The installer for machines that join, and the command line that runs it. Pure."""

from __future__ import annotations

import hashlib
import shlex
from dataclasses import dataclass
from importlib.resources import files

from corral.controller.distribution.own_wheel import OwnWheel

_FOLDER = "corral.controller.distribution"
# `sh -c` runs a constant text: arguments can be seen by every user of a machine, so the token goes through a pipe.
_COMMAND = (
    "printf %s {token} | sh -c '"
    "u={url}; f=$(mktemp) && "
    # The worker connects directly too, so a proxy is for the package index only.
    "( unset http_proxy https_proxy all_proxy HTTP_PROXY HTTPS_PROXY ALL_PROXY; "
    "curl -fsSL{insecure} $u/install.sh -o $f || wget -q{unverified} -O $f $u/install.sh ) && "
    'case $(sha256sum $f 2>/dev/null || shasum -a 256 $f) in {sha256}*) CORRAL_INSTALLER=$f exec sh $f $u "$@";; esac; '
    'rm -f $f; echo "corral: $u/install.sh could not be downloaded, or is not the one of this command: '
    'nothing was run" >&2; exit 1'
    "' corral"
)


@dataclass(frozen=True)
class Installer:
    """The same bytes for every controller of one version and one cluster; it contains no secret."""

    text: str
    sha256: str


def make_installer(wheel: OwnWheel, ca_fingerprint: str) -> Installer:
    """`ca_fingerprint`: of the cluster's own CA; empty without one, and where the command has `--ca`."""
    template = files(_FOLDER).joinpath("install.sh").read_text(encoding="utf-8")
    fetcher = files(_FOLDER).joinpath("fetch_wheels.py").read_text(encoding="utf-8")
    values = {
        "@VERSION@": wheel.version,
        "@WHEEL@": wheel.name,
        "@SHA256@": wheel.sha256,
        "@CA@": ca_fingerprint,
        "@FETCHER@\n": fetcher,
    }
    for mark, value in values.items():
        template = template.replace(mark, value)
    return Installer(template, hashlib.sha256(template.encode()).hexdigest())


def install_command(url: str, installer_sha256: str, token: str, pin: str = "") -> str:
    """The line for a bare machine. It downloads the installer, checks its hash, and only then runs it; so the download
    itself need not be trusted: the certificate of a private CA is not verified, and plain HTTP is safe too. `pin`: for
    `--ca`, where the installer does not have it."""
    is_private = url.startswith("https://")
    command = _COMMAND.format(
        token=shlex.quote(token),
        url=shlex.quote(url).replace("'", "'\\''"),
        sha256=installer_sha256,
        insecure="k" if is_private else "",
        unverified=" --no-check-certificate" if is_private else "",
    )
    return f"{command} --ca {pin}" if pin else command
