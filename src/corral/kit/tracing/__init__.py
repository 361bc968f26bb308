"""Traces: W3C trace context, spans, and their export as OTLP over HTTP (docs/adr/0038-otlp-without-the-sdk.md).

A process that exports no traces has no `Tracer`, and passes a client's `traceparent` on as any other header.
"""
