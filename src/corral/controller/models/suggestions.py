"""Suggests similar names: for unknown models and misspelled fields of definitions. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from corral.gallery.models.library import with_unread
from corral.kit.errors import NotFound
from corral.kit.humanize import format_suggestions, similar_names, suggest_names

# The fields of a definition that Corral reads. Engines may have others: a note appears only for a similar name.
FIELDS = (
    *("name", "alias", "backend", "parameters", "download_files", "artifacts", "mmproj", "context_size", "parallel"),
    *("memory", "tensor_parallel", "tensor_parallel_size", "embeddings", "reranking", "threads", "gpu_layers"),
    *(
        "concurrency_groups",
        "pinned",
        "disabled",
        "limits",
        "idle_unload",
        "while_loading",
        "load_wait",
        "resume_streams",
    ),
)
MIN_SIMILARITY = 0.85


def suggestions_for(name: str, known: Iterable[str]) -> str:
    """The end of an error message about a model that does not exist."""
    return format_suggestions(suggest_names(name, sorted(known)))


def misspelled_fields(words: Iterable[str]) -> tuple[str, ...]:
    """A sentence for each field of a definition that resembles a known one."""
    near = {word: similar_names(word, FIELDS, limit=1, cutoff=MIN_SIMILARITY) for word in words if word not in FIELDS}
    return tuple(
        f"`{word}` means nothing to the fleet: was `{meant[0]}` meant?" for word, meant in near.items() if meant
    )


def unknown_model(name: str, known: Iterable[str], unread: Mapping[str, str] | None = None) -> str:
    """One line, and one more for each gallery that could not be read."""
    hint = suggestions_for(name, known) or "; `corral models list` and `corral models available` show which there are"
    return with_unread(f"there is no model {name!r}{hint}", unread or {})


class UnknownModel(NotFound):
    """No gallery has the model; `known` are the names they have."""

    def __init__(self, message: str, known: Iterable[str], unread: Mapping[str, str]) -> None:
        super().__init__(with_unread(message, unread))
        self.known = tuple(known)
        self.unread = dict(unread)
