"""The values that labels may have. Each series costs memory here and in Prometheus, so labels have only names that the
fleet knows, at most `MAX_VALUES` of each kind. Everything else counts as `other`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

OTHER = "other"
NONE = "none"  # a request that reached no node
MAX_VALUES = 100  # of one label
MAX_SERIES = 2000  # combinations of model, node and key
MAX_PAIRS = 200  # combinations of model and node: a histogram has about twenty lines


class LabelNames:
    """The label of each id of one kind. The first `limit` names get a label of their own, for as long as the process
    lives: a counter must not change its labels when a later name appears."""

    def __init__(self, limit: int = MAX_VALUES) -> None:
        self._limit = limit
        self._known: dict[str, str] = {}  # by id
        self._labels: set[str] = set()

    def learn(self, names: Mapping[str, str]) -> None:
        """`names`: by id, those of now. A renamed id counts under its new name from now on."""
        self._known |= names

    def unknown(self, ids: Iterable[str]) -> bool:
        return not self._known.keys() >= set(ids)

    def label(self, id_: str) -> str:
        """`none` for an empty id."""
        if not id_:
            return NONE
        name = self._known.get(id_, OTHER)
        if name in self._labels:
            return name
        if name == OTHER or len(self._labels) >= self._limit:
            return OTHER
        self._labels.add(name)
        return name
