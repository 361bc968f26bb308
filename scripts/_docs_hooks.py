"""Hooks of mkdocs (scripts/docs): a page that lists the decision records, links to files that the site does not have,
and the check that every page can be reached from the first one."""

from __future__ import annotations

import posixpath
import re
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

FIRST = "README.md"
DECISIONS = "adr/index.md"
_LINK = re.compile(r"(?<!!)\[([^\]\n]*)\]\(([^)\s]+)\)")
_FENCE = re.compile(r"^(```|~~~).*?^\1\s*$", re.MULTILINE | re.DOTALL)


def on_files(files: Files, config: Any) -> Files:
    records = sorted(file.src_uri for file in files.documentation_pages() if file.src_uri.startswith("adr/"))
    titles = {uri: _title(files, uri) for uri in records}
    lines = [f"- [{title}]({posixpath.basename(uri)})" for uri, title in titles.items()]
    page = "# Decision records\n\nWhy single decisions were taken.\n\n" + "\n".join(lines) + "\n"
    files.append(File.generated(config, DECISIONS, content=page))
    _refuse_orphans(files)
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Folders become their lists; a file of the source that is no page keeps its name without a link."""

    def link(found: re.Match[str]) -> str:
        text, target = found.groups()
        place = _target(page.file.src_uri, target)
        if place == "adr":
            return f"[{text}]({posixpath.relpath(DECISIONS, posixpath.dirname(page.file.src_uri) or '.')})"
        return text if place is not None and place.startswith("..") else found[0]

    return _LINK.sub(link, markdown)


def _target(base: str, link: str) -> str | None:
    """Below docs/; None for an address elsewhere or on the same page."""
    path = link.partition("#")[0]
    if not path or re.match(r"[a-z][a-z0-9+.-]*:", link):
        return None
    return posixpath.normpath(posixpath.join(posixpath.dirname(base), path))


def _title(files: Files, uri: str) -> str:
    found = files.get_file_from_path(uri)
    assert found is not None
    return found.content_string.partition("\n")[0].removeprefix("# ").strip()


def _refuse_orphans(files: Files) -> None:
    pages = {file.src_uri: file for file in files.documentation_pages()}
    reached, left = {FIRST}, [FIRST]
    while left:
        here = left.pop()
        for _, link in _LINK.findall(_FENCE.sub("", pages[here].content_string)):
            target = _target(here, link)
            target = DECISIONS if target == "adr" else target
            if target in pages and target not in reached:
                reached.add(target)
                left.append(target)
    if orphans := sorted(pages.keys() - reached):
        raise PluginError(f"no link leads to {', '.join(orphans)}")
