"""The sources that `corral models install` takes besides names in galleries. Pure.

hf://owner/repo[@revision][:quant]          a repository of the hub; also huggingface:// and hf.co/
hf://owner/repo[@revision]/path/x.gguf      one file of it
modelscope://owner/repo…                    the same of ModelScope
https://huggingface.co/owner/repo[/…]       what the browser shows of the same
https://modelscope.cn/models/owner/repo[/…]
https://host/path/x.gguf                    a file anywhere
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from urllib.parse import unquote, urlsplit

from corral.contract.installs import MAX_SOURCE_LENGTH
from corral.contract.sources import HTTP, MODELSCOPE, file_name, is_repository_id, is_safe_path, parse_uri
from corral.kit.errors import Invalid

_HUB = re.compile(r"(?:(?P<scheme>hf|huggingface|modelscope)://|hf\.co/)", re.IGNORECASE)
# As its browser writes it: models/owner/repo, …/files, …/file/view/revision/path, …/resolve/revision/path.
_PAGE = re.compile(
    r"/models/(?P<repository>[^/?#]+/[^/?#]+)"
    r"(?:/(?:files|summary)?|/(?:file/view|resolve)/(?P<revision>[^/?#]+)/(?P<path>[^?#]+))?(?:[?#].*)?\Z"
)
EXAMPLES = (
    "write hf://owner/repo, hf://owner/repo:Q4_K_M, hf://owner/repo/file.gguf, modelscope://owner/repo or "
    "https://host/file.gguf"
)


@dataclass(frozen=True)
class HubSource:
    repository: str  # owner/name
    revision: str = ""  # empty: the main branch
    path: str = ""  # of one file; empty: the repository
    quant: str = ""  # only without a path
    is_modelscope: bool = False  # else of the usual hub


@dataclass(frozen=True)
class WebSource:
    url: str
    name: str  # of the file


def is_source(text: str) -> bool:
    """Whether the text names a place, not a model of a gallery."""
    return "://" in text or _HUB.match(text) is not None


def parse_source(text: str, *, hub_url: str, modelscope_url: str = MODELSCOPE) -> HubSource | WebSource:
    """The pages of the hubs at these URLs count as their repositories. Raises Invalid."""
    text = text.strip()
    if len(text) > MAX_SOURCE_LENGTH or not text.isprintable():
        raise Invalid(f"a source has at most {MAX_SOURCE_LENGTH} printable characters")
    if (scheme := _HUB.match(text)) is not None:
        is_modelscope = (scheme["scheme"] or "").lower() == "modelscope"
        return replace(_hub_source(text[scheme.end() :], text), is_modelscope=is_modelscope)
    if not text.lower().startswith(("https://", "http://")):
        raise Invalid(f"{text[:200]!r} is not a source of models; {EXAMPLES}")
    base = hub_url.rstrip("/") + "/"
    if text.startswith(base):
        return _hub_page(text.removeprefix(base), text)
    if (page := _PAGE.match(text.removeprefix(modelscope_url.rstrip("/")))) and text.startswith(modelscope_url):
        parts = [unquote(part or "") for part in page.group("repository", "revision", "path")]
        return replace(_checked(parts[0], parts[1], parts[2], "", text), is_modelscope=True)
    return _web_source(text)


def _hub_source(rest: str, text: str) -> HubSource:
    owner, _, tail = rest.rstrip("/").partition("/")
    name, slash, path = tail.partition("/")
    quant = ""
    if not slash:
        name, _, quant = name.partition(":")
    name, _, revision = name.partition("@")
    if not revision and slash:
        path, _, revision = path.partition("@")
    return _checked(f"{owner}/{name}", revision, path, quant.strip(), text)


def _hub_page(rest: str, text: str) -> HubSource:
    """As the browser writes it: owner/repo, owner/repo/tree/revision, owner/repo/blob|resolve/revision/path."""
    parts = unquote(urlsplit(rest).path).strip("/").split("/")
    repository, kind, revision = "/".join(parts[:2]), parts[2:3], parts[3:4]
    if len(parts) <= 2:
        return _checked(repository, "", "", "", text)
    if kind == ["tree"] and revision:
        return _checked(repository, revision[0], "", "", text)
    if kind in (["blob"], ["resolve"], ["raw"]) and len(parts) > 4:
        return _checked(repository, revision[0], "/".join(parts[4:]), "", text)
    raise Invalid(f"{text[:200]!r} is not a repository or a file of the hub; {EXAMPLES}")


def _checked(repository: str, revision: str, path: str, quant: str, text: str) -> HubSource:
    if not is_repository_id(repository):
        raise Invalid(f"{text[:200]!r} names no repository of the hub; {EXAMPLES}")
    if path and not is_safe_path(path):
        raise Invalid(f"{path[:200]!r} leads out of the repository")
    if path and not path.lower().endswith(".gguf"):
        raise Invalid(f"{path[:200]!r} is not a GGUF file: name the repository alone, or one of its .gguf files")
    return HubSource(repository, revision, path, quant)


def _web_source(text: str) -> WebSource:
    source = parse_uri(text)
    assert source.kind == HTTP
    name = file_name(text)
    if not name.lower().endswith(".gguf"):
        raise Invalid(f"{text[:200]!r} does not end in .gguf: a URL names one GGUF file; {EXAMPLES}")
    return WebSource(source.uri, name)
