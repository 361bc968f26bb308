"""The size of a model as users see it: of its fetched files, otherwise as on disk or as declared. Placement decides by
`replicas/provisioners.py`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from urllib.parse import unquote, urlsplit

from corral.contract.models import Definition
from corral.controller.files.required_files import current_files, is_member, parse_member, required_files
from corral.controller.models.views import FilesMeasured
from corral.kit.errors import Invalid
from corral.store.tables.model_files import StoredFile


class FileSizes:
    def __init__(self, folder: Path, folders: Sequence[Path]) -> None:
        """`folder`: the models folder. `folders`: those that `file://` sources may lead into; of others nothing is
        told, not even a size."""
        self._folder = folder
        self._folders = folders

    def measure(self, definition: Definition, stored: Sequence[StoredFile]) -> FilesMeasured:
        """As far as it is known: a file of unknown size counts as nothing. May look at the disk, so not in the loop."""
        rows = current_files(definition, stored)
        unpacked = {parse_member(row.uri).path for row in rows if is_member(row.uri)}
        own = [row for row in rows if row.path not in unpacked]  # an archive is what was in it
        known = unpacked | {row.path for row in rows}
        # What was taken from the models folder stands in the rows: no need to walk through it at every look.
        folder = None if any(row.uri.startswith("file:") for row in rows) else self._folder
        try:
            wanted = required_files(definition, folder)
        except (Invalid, OSError):
            wanted = definition.files
        rest = [file for file in wanted if file.path not in known]
        size_bytes = sum(row.size_bytes for row in own)
        size_bytes += sum(file.size_bytes or self._size_on_disk(file.uri) for file in rest)
        return FilesMeasured(len(definition.files) or len(own) + len(rest), size_bytes)

    def _size_on_disk(self, uri: str) -> int:
        if not uri.startswith("file:"):
            return 0
        try:
            real = Path(unquote(urlsplit(uri).path)).resolve()
            is_open = any(real.is_relative_to(folder.resolve()) for folder in self._folders)
            return real.stat().st_size if is_open and real.is_file() else 0
        except (OSError, ValueError):
            return 0
