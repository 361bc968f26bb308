"""What a model is for, as far as its definition says so. Pure."""

from __future__ import annotations

from corral.contract.models import Definition

CHAT, EMBEDDINGS, RERANK = "chat", "embeddings", "rerank"
_USECASES = {"chat": CHAT, "completion": CHAT, "embeddings": EMBEDDINGS, "rerank": RERANK}
_OTHERS = frozenset(  # a model that is for nothing but these does not chat
    ("transcript", "tts", "image", "video", "vad", "detection", "sound_generation", "speaker_recognition", "tokenize")
)


def kinds_of(definition: Definition) -> tuple[str, ...]:
    """Of a model that says nothing: chat, as most are. `known_usecases` has the last word."""
    named = _usecases(definition)
    if named:
        kinds = {_USECASES[word] for word in named if word in _USECASES}
        return tuple(sorted(kinds)) if kinds or named <= _OTHERS else (CHAT,)
    if definition.embeddings or definition.reranking:
        return (*((EMBEDDINGS,) if definition.embeddings else ()), *((RERANK,) if definition.reranking else ()))
    return (CHAT,)


def reads_images(definition: Definition) -> bool:
    return bool(definition.whole.get("mmproj")) or "vision" in _usecases(definition)


def _usecases(definition: Definition) -> set[str]:
    """LocalAI writes them as `chat` or `FLAG_CHAT`."""
    found = definition.whole.get("known_usecases")
    listed = found if isinstance(found, list) else []
    return {word.lower().removeprefix("flag_") for word in listed if isinstance(word, str)}
