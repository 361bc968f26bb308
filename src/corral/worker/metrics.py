"""What the worker counts, in a registry of its own: two workers in one test process do not share numbers."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Info, generate_latest

from corral import __version__

CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"


class WorkerMetrics:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        Info("corral_worker", "The worker's version.", registry=self.registry).info({"version": __version__})
        self.registrations = Counter(
            "corral_worker_registrations", "Tries to register, by outcome.", ["outcome"], registry=self.registry
        )
        self.heartbeats = Counter(
            "corral_worker_heartbeats", "Heartbeats, by way and outcome.", ["way", "outcome"], registry=self.registry
        )
        self.bus_connected = Gauge(
            "corral_worker_bus_connected", "1 while the bus is connected.", registry=self.registry
        )
        self.clock_skew = Gauge(
            "corral_worker_clock_skew_seconds",
            "How far ahead of this machine's clock the controller's is.",
            registry=self.registry,
        )
        self.requests = Counter(
            "corral_worker_ingress_requests", "Requests at the ingress.", ["route", "status"], registry=self.registry
        )
        self.in_flight = Gauge(
            "corral_worker_ingress_in_flight", "Requests under way at the ingress.", registry=self.registry
        )

        self.received_blob_bytes = Counter(
            "corral_worker_blob_received_bytes",
            "Verified bytes of blobs, by kind of source: controller or peer.",
            ["source"],
            registry=self.registry,
        )
        self.sent_blob_bytes = Counter(
            "corral_worker_blob_sent_bytes", "Bytes of blobs that were sent to other workers.", registry=self.registry
        )

        self.spans_sent = Counter(
            "corral_worker_spans_sent", "Spans that the collector of traces accepted.", registry=self.registry
        )
        self.traces_dropped = Counter(
            "corral_worker_traces_dropped",
            "Spans that were not sent: the collector was away for too long, or refused them.",
            registry=self.registry,
        )
        self.orders = Counter(
            "corral_worker_orders",
            "Accepted orders that have ended, by kind.",
            ["kind", "outcome"],
            registry=self.registry,
        )
        self.running_orders = Gauge(
            "corral_worker_orders_under_way", "Accepted orders being carried out.", registry=self.registry
        )

    def render(self) -> bytes:
        return generate_latest(self.registry)
