"""Bytes over HTTP into a file: resumed, verified, bounded. `fetcher.py` is the entry point."""
