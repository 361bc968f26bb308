"""Counts requests by model, node and key. It reads receipts, which gateways send in batches once a second or so: no
request waits for this, and the gateways spend nothing on it.

A gateway sends a batch again when the response was lost; that batch then counts twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final, TypeVar

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from corral.contract.receipts import Receipt
from corral.controller.metrics.labels import MAX_PAIRS, MAX_SERIES, OTHER, LabelNames
from corral.kit.clock import Clock
from corral.kit.errors import CorralError
from corral.kit.histogram import Histogram
from corral.kit.log import get_log
from corral.store.engine.transactions import Store
from corral.store.tables import api_keys, models, nodes

log = get_log(__name__)
K = TypeVar("K")
V = TypeVar("V")

_READ_NAMES_S: Final = 1.0  # at most so often
_PER_TOKEN_BOUNDS_S: Final = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0)

_OF_A_REQUEST: Final = ("model", "node", "key")


class RequestCounts:
    """Of one model, node and key."""

    __slots__ = ("by_status", "completion_tokens", "prompt_tokens")

    def __init__(self) -> None:
        self.by_status: dict[int, int] = {}
        self.prompt_tokens = 0
        self.completion_tokens = 0


class Durations:
    """Of one model and node."""

    __slots__ = ("first_token", "load", "per_token", "queue", "total")

    def __init__(self) -> None:
        self.total = Histogram()
        self.first_token = Histogram()
        self.per_token = Histogram(_PER_TOKEN_BOUNDS_S)
        self.queue = Histogram()
        self.load = Histogram()


_HISTOGRAMS: Final = {
    "total": ("corral_request_seconds", "From the request to the end of its response."),
    "first_token": (
        "corral_time_to_first_token_seconds",
        "From the request to the first event of a streamed response that has content; it includes waiting.",
    ),
    "per_token": (
        "corral_time_per_output_token_seconds",
        "Of a streamed response: the time from its first token to its end, divided by the number of further tokens.",
    ),
    "queue": ("corral_queue_seconds", "How long requests waited for a slot; only requests that waited."),
    "load": ("corral_load_wait_seconds", "How long requests waited for a cold model; only requests that waited."),
}


class RequestMetrics(Collector):
    def __init__(
        self, store: Store, clock: Clock, *, max_series: int = MAX_SERIES, max_histograms: int = MAX_PAIRS
    ) -> None:
        self._store = store
        self._clock = clock
        self._max_series = max_series
        self._max_histograms = max_histograms
        self.models, self.nodes, self.keys = LabelNames(), LabelNames(), LabelNames()
        self._read_names_at = float("-inf")
        self._counts: dict[tuple[str, str, str], RequestCounts] = {}
        self._durations: dict[tuple[str, str], Durations] = {}

    async def on_receipts(self, receipts: Sequence[Receipt]) -> None:
        if self._has_unknown(receipts) and self._clock.monotonic() - self._read_names_at >= _READ_NAMES_S:
            try:
                await self.read_names()
            except CorralError as error:
                log.debug("names for metrics could not be read", reason=error.message)
        self.count(receipts)

    async def read_names(self) -> None:
        self._read_names_at = self._clock.monotonic()
        async with self._store.read() as tx:
            known = {model: model for model in await models.list_ids(tx)}
            node_names = await nodes.list_names(tx)
            key_names = {key.id: key.name for key in await api_keys.list_(tx)}
        self.models.learn(known)
        self.nodes.learn(node_names)
        self.keys.learn(key_names)

    def count(self, receipts: Iterable[Receipt]) -> None:
        labels: dict[tuple[str, str, str], tuple[RequestCounts, Durations]] = {}  # those of a batch have few
        for receipt in receipts:
            ids = (receipt.served_by or receipt.model, receipt.node_id, receipt.key_id)
            found = labels.get(ids)
            if found is None:
                found = labels[ids] = self._of(*ids)
            _count(receipt, *found)

    def _has_unknown(self, receipts: Iterable[Receipt]) -> bool:
        ids = {(receipt.served_by or receipt.model, receipt.node_id, receipt.key_id) for receipt in receipts}
        by_kind = zip((self.models, self.nodes, self.keys), zip(*ids, strict=True), strict=False)
        return any(names.unknown(each for each in of_kind if each) for names, of_kind in by_kind)

    def _of(self, model_id: str, node_id: str, key_id: str) -> tuple[RequestCounts, Durations]:
        model, node, key = self.models.label(model_id), self.nodes.label(node_id), self.keys.label(key_id)
        counts = _get_or_add(self._counts, (model, node, key), (OTHER, OTHER, OTHER), RequestCounts, self._max_series)
        return counts, _get_or_add(self._durations, (model, node), (OTHER, OTHER), Durations, self._max_histograms)

    def collect(self) -> Iterable[Metric]:
        """In a thread of its own: it copies each dictionary before it reads it, because the loop goes on counting."""
        requests = CounterMetricFamily(
            "corral_requests", "Requests for models that ended, by the status that the client got.",
            labels=[*_OF_A_REQUEST, "status"],
        )  # fmt: skip
        prompt = CounterMetricFamily("corral_prompt_tokens", "Tokens in.", labels=_OF_A_REQUEST)
        completion = CounterMetricFamily("corral_completion_tokens", "Tokens out.", labels=_OF_A_REQUEST)
        for labels, counts in list(self._counts.items()):
            for status, count in sorted(list(counts.by_status.items())):
                requests.add_metric([*labels, str(status)], count)
            prompt.add_metric(labels, counts.prompt_tokens)
            completion.add_metric(labels, counts.completion_tokens)
        yield from (requests, prompt, completion)
        for field, (name, text) in _HISTOGRAMS.items():
            family = HistogramMetricFamily(name, text, labels=["model", "node"])
            for pair, durations in list(self._durations.items()):
                histogram: Histogram = getattr(durations, field)
                family.add_metric(pair, histogram.buckets(), histogram.total_s)
            yield family


def _get_or_add(known: dict[K, V], labels: K, rest: K, new: Callable[[], V], limit: int) -> V:
    """The entry with these labels; beyond the limit the one that has all the rest."""
    found = known.get(labels)
    if found is None:
        if len(known) >= limit:
            labels = rest
        found = known.setdefault(labels, new())
    return found


def _count(receipt: Receipt, counts: RequestCounts, durations: Durations) -> None:
    status = receipt.status if 100 <= receipt.status <= 599 else 0
    counts.by_status[status] = counts.by_status.get(status, 0) + 1
    counts.prompt_tokens += max(0, receipt.prompt_tokens)
    counts.completion_tokens += max(0, receipt.completion_tokens)
    durations.total.observe(receipt.total_ms / 1000)
    if receipt.first_byte_ms:
        durations.first_token.observe(receipt.first_byte_ms / 1000)
        if receipt.completion_tokens > 1:
            rest_s = max(0.0, receipt.total_ms - receipt.first_byte_ms) / 1000
            durations.per_token.observe(rest_s / (receipt.completion_tokens - 1))
    if receipt.queue_ms:
        durations.queue.observe(receipt.queue_ms / 1000)
    if receipt.load_ms:
        durations.load.observe(receipt.load_ms / 1000)
