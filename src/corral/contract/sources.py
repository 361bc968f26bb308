"""Where a build lives and what exactly is meant by it (docs/reference/wire/gallery.md#uri-forms).

A `Source` travels from the controller, which resolved it, to the worker, which fetches it. Several sources in an order
are alternatives for the same content, best first: a worker that fails with one tries the next. `gallery` makes them,
`blobs` fetches them; neither imports the other, so what both must agree on stands here. Pure.
"""

from __future__ import annotations

import re
from pathlib import PurePosixPath
from typing import NamedTuple, Protocol
from urllib.parse import unquote, urlencode, urlsplit

from msgspec import structs

from corral.contract.codec import Message, always
from corral.kit.errors import Invalid
from corral.kit.redact import remove_logins

OCI = "oci"  # uri: an image reference without a scheme; digest: of the index or manifest the tag pointed to
HTTP = "http"  # uri: an http(s) URL of an archive; digest: sha256 of the file, when known
FILE = "file"  # uri: a path on the worker, an archive
DIRECTORY = "directory"  # uri: a path on the worker: a folder, copied; or, as people write it, an archive
OCIFILE = "ocifile"  # uri: a path on the worker, an image tarball (docker-save or OCI layout)
PYPI = "pypi"  # uri: a requirement, `name==version`; `wheels` are all there is to install, nothing else is looked up
INLINE = "inline"  # uri: for people only; `files` are the whole content
KINDS = (OCI, HTTP, FILE, DIRECTORY, OCIFILE, PYPI, INLINE)

# The registries whose references are known as images without `oci://`.
IMAGE_HOSTS = tuple(f"{name}.io" for name in ("quay", "ghcr", "docker"))
RAW_GITHUB = "https://raw.githubusercontent.com"
HUB = "https://huggingface.co"
MODELSCOPE = "https://modelscope.cn"

_DIGEST = re.compile(r"sha256:[0-9a-f]{64}\Z")
_HOST = re.compile(r"[A-Za-z0-9][A-Za-z0-9.-]*(?::[0-9]+)?\Z")
_REFERENCE = re.compile(
    r"(?P<path>[a-z0-9]+(?:[._-]+[a-z0-9]+)*(?:/[a-z0-9]+(?:[._-]+[a-z0-9]+)*)*)"
    r"(?::(?P<tag>[A-Za-z0-9_][A-Za-z0-9._-]{0,127}))?"
    r"(?:@(?P<digest>sha256:[0-9a-f]{64}))?\Z"
)
_REPOSITORY_ID = re.compile(r"(?!.*(?:--|\.\.))[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*\Z")
_REPOSITORY = re.compile(
    r"(?:(?P<hub>huggingface|hf|modelscope)://|hf\.co/)"
    r"(?P<id>[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*)(?:@(?P<revision>[^@?#/\s]+))?/?\Z"
)
_REQUIREMENT = re.compile(
    r"(?P<name>[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?)"
    r"(?P<extras>\[[A-Za-z0-9._, -]*\])?"
    r"(?:==(?P<version>[A-Za-z0-9.!+_-]+))?\Z"
)


class Wheel(Message, frozen=True):
    """One locked wheel. It is installed only if the bytes have this hash."""

    name: str = always(str)  # of the file, as in the index: demo-1.0-py3-none-any.whl
    url: str = always(str)
    sha256: str = always(str)  # bare hex
    size: int = 0  # bytes; 0: the index does not say
    project: str = ""  # normalised: demo
    version: str = ""


class TextFile(Message, frozen=True):
    """A small file that comes with the order itself: the glue between an engine and Corral."""

    path: str = always(str)  # relative to the version's folder, with /
    text: str = always(str)
    executable: bool = False


class Source(Message, frozen=True):
    kind: str = always(str)
    uri: str = always(str)
    digest: str = ""  # sha256:…; empty: unknown, so any content is accepted and its digest recorded
    size: int = 0  # bytes to fetch; 0: unknown
    platform: str = ""  # os/arch; which image of an index, which wheels
    wheels: tuple[Wheel, ...] = ()  # of a pypi source, all of them
    python: str = ""  # of a pypi source: the version the wheels were chosen for, 3.11
    files: tuple[TextFile, ...] = ()  # written into the version's folder after everything else


class PlatformImage(Message, frozen=True):
    platform: str = always(str)  # os/arch, with a variant where the index has one: linux/arm64/v8
    digest: str = always(str)  # of this platform's manifest
    size: int = 0  # bytes of its layers as they are sent; 0: unknown


class ImageIndex(Message, frozen=True):
    """What a tag points to. A single image counts as an index of one platform."""

    digest: str = always(str)  # of the index: what the contract reports as the build's digest
    images: tuple[PlatformImage, ...] = always(tuple)

    def find(self, platform: str) -> PlatformImage | None:
        """The image for os/arch; a variant in the index (arm64/v8) does not matter unless asked for."""
        for image in self.images:
            if image.platform == platform or image.platform.startswith(f"{platform}/"):
                return image
        return None


class Registry(Protocol):
    """What `gallery` needs of an image registry; `blobs` has the client."""

    async def look_up(self, reference: str) -> ImageIndex:
        """Raises NotFound where there is no such image or tag, Unreachable or Failed when it cannot be asked."""


class ImageReference(Message, frozen=True):
    host: str
    repository: str
    tag: str = ""
    digest: str = ""

    def __str__(self) -> str:
        tag = f":{self.tag}" if self.tag else ""
        return f"{self.host}/{self.repository}{tag}{'@' + self.digest if self.digest else ''}"


def parse_reference(text: str) -> ImageReference:
    """`host/path:tag@digest`; without a host it is the public hub's, without tag and digest it is `latest`."""
    host, slash, rest = text.partition("/")
    if not slash or not _is_host(host):
        host, rest = IMAGE_HOSTS[-1], text
    found = _REFERENCE.match(rest)
    if found is None:
        raise Invalid(f"{text[:200]!r} is not an image reference; write host/path:tag or host/path@sha256:…")
    path, tag, digest = found["path"], found["tag"] or "", found["digest"] or ""
    if host == IMAGE_HOSTS[-1] and "/" not in path:
        path = f"library/{path}"  # the hub's own images have no owner
    return ImageReference(host, path, tag or ("" if digest else "latest"), digest)


def parse_uri(
    text: str, *, image: bool = False, github: str = RAW_GITHUB, hub: str = HUB, modelscope: str = MODELSCOPE
) -> Source:
    """What the contract's forms mean. Raises Invalid for anything else.

    With `image` a reference without a host is an image too: the mirrors of an image are written that way in galleries.
    `github`, `hub` and `modelscope` are where `github:`, `huggingface://` and `modelscope://` lead.
    """
    text = text.strip()
    scheme, _, rest = text.partition("://")
    match scheme.lower() if rest else "":
        case "oci":
            return _image(rest)
        case "http" | "https":
            return Source(HTTP, _url(text))
        case "ocifile":
            return Source(OCIFILE, _path(rest))
        case "file":
            return Source(FILE, _path(unquote(rest)))
        case "pypi":
            return Source(PYPI, parse_requirement(rest))
        case "huggingface" | "hf":
            return Source(HTTP, _hub_url(rest, hub))
        case "modelscope":
            return Source(HTTP, modelscope_url(parse_hub_file(rest), modelscope))
        case "github":
            return Source(HTTP, github_url(rest, github))
        case "ollama":
            raise Invalid(f"{text[:200]!r} names a model, not a backend")
    if text.startswith("github:"):
        return Source(HTTP, github_url(text.removeprefix("github:"), github))
    if text.startswith("hf.co/"):
        return Source(HTTP, _hub_url(text.removeprefix("hf.co/"), hub))
    if text.startswith(("/", "./", "../")):
        return Source(DIRECTORY, text)
    if text.partition("/")[0] in IMAGE_HOSTS:
        return _image(text)
    if image and "://" not in text and text:
        return _image(text)
    raise Invalid(f"{text[:200]!r} is not a source; write oci://, http(s)://, file://, ocifile://, pypi:// or a path")


def is_path_on_node(uri: str) -> bool:
    """Whether the URI names a file or folder of the machine that installs it; nobody else can look there."""
    return uri.strip().lower().startswith(("file://", "ocifile://", "/", "./", "../"))


class HubRepository(NamedTuple):
    id: str  # owner/name
    revision: str = ""  # a branch, a tag or a commit; empty: the main one
    is_modelscope: bool = False


class HubFilePath(NamedTuple):
    """One file of a repository of a hub."""

    repository: str  # owner/name
    revision: str  # empty: the main branch
    path: str  # as in a URL, so perhaps quoted


def parse_repository(text: str) -> HubRepository | None:
    """`huggingface://owner/name[@revision]` or `modelscope://…`: all of a repository of a hub. None for anything else,
    such as one file."""
    found = _REPOSITORY.match(text.strip())
    if found is None:
        return None
    return HubRepository(found["id"], found["revision"] or "", found["hub"] == "modelscope")


def is_repository_id(text: str) -> bool:
    """Whether it could be a repository's name on the hub."""
    return _REPOSITORY_ID.match(text) is not None


def parse_requirement(text: str) -> str:
    """`name`, `name==version`, extras allowed, with the name in its normal form. Ranges would not name one thing."""
    found = _REQUIREMENT.match(text.strip().rstrip("/"))
    if found is None:
        raise Invalid(f"{text[:200]!r} is not a package; write pypi://name or pypi://name==version")
    extras = "".join((found["extras"] or "").split())
    version = f"=={found['version']}" if found["version"] else ""
    return normal_name(found["name"]) + (extras if extras != "[]" else "") + version


def normal_name(project: str) -> str:
    """How an index writes a project's name: My_Pkg and my-pkg are one."""
    return re.sub(r"[-_.]+", "-", project).lower()


def is_digest(text: str) -> bool:
    return _DIGEST.match(text) is not None


def is_safe_path(path: str) -> bool:
    """Whether a relative path stays inside the folder it will be joined to."""
    parts = PurePosixPath(path).parts
    hostile = any(part == ".." or ord(min(part)) < 0x20 or "\\" in part for part in parts)
    return bool(parts) and not path.startswith("/") and not hostile


def file_name(uri: str) -> str:
    """The default name of a file from this URI. Raises Invalid."""
    path = unquote(urlsplit(uri).path) if "://" in uri else uri
    name = PurePosixPath(path.partition("@")[0]).name
    if not name or not is_safe_path(name):
        raise Invalid(f"{uri[:200]!r} does not end in a file's name")
    return name


def public_source(source: Source) -> Source:
    """The source as workers receive it: logins in its URLs stay on the controller."""
    if source.kind not in (HTTP, PYPI):
        return source
    wheels = tuple(structs.replace(wheel, url=remove_logins(wheel.url)) for wheel in source.wheels)
    return structs.replace(source, uri=remove_logins(source.uri), wheels=wheels)


def github_url(text: str, base: str = RAW_GITHUB) -> str:
    """`org/repo/path@branch` as the raw file's URL; without a branch it is `main`."""
    path, _, branch = text.lstrip("/").partition("@")
    org, _, rest = path.partition("/")
    repository, _, file = rest.partition("/")
    if not (org and repository and file):
        raise Invalid(f"{text[:200]!r} is not a file on GitHub; write github:org/repo/path@branch")
    return f"{base}/{org}/{repository}/{branch or 'main'}/{file}"


def parse_hub_file(text: str) -> HubFilePath:
    """`owner/repo[@revision]/path` or `owner/repo/path[@revision]`. Raises Invalid."""
    owner, _, rest = text.partition("/")
    repository, _, file = rest.partition("/")
    if not (owner and repository and file):
        raise Invalid(f"{text[:200]!r} is not a file on the hub; write huggingface://owner/repo/path")
    # A revision may stand behind the repository or behind the file; wherever it stands it means the same.
    repository, _, early = repository.partition("@")
    file, _, late = (file, "", "") if early else file.partition("@")
    return HubFilePath(f"{owner}/{repository}", early or late, file)


def modelscope_url(file: HubFilePath, base: str = MODELSCOPE) -> str:
    """The download of a file, as ModelScope's own client requests it."""
    chosen = urlencode({"Revision": file.revision or "master", "FilePath": unquote(file.path)})
    return f"{base.rstrip('/')}/api/v1/models/{file.repository}/repo?{chosen}"


def _hub_url(text: str, hub: str) -> str:
    file = parse_hub_file(text)
    return f"{hub.rstrip('/')}/{file.repository}/resolve/{file.revision or 'main'}/{file.path}"


def _image(text: str) -> Source:
    reference = parse_reference(text)
    return Source(OCI, str(reference), digest=reference.digest)


def _url(text: str) -> str:
    """Checks only that it names a host; whether the host may be asked is for the caller."""
    try:
        parts = urlsplit(text)
        sound = bool(parts.hostname) and not any(letter.isspace() for letter in text) and parts.port != 0
    except ValueError:
        sound = False
    if not sound:
        raise Invalid(f"{text[:200]!r} is not a URL; write https://host/path")
    return text


def _path(text: str) -> str:
    if not text.startswith("/"):
        raise Invalid(f"{text[:200]!r} is not an absolute path")
    return text


def _is_host(text: str) -> bool:
    return ("." in text or ":" in text or text == "localhost") and _HOST.match(text) is not None
