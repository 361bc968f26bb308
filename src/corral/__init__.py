"""Corral: one OpenAI-compatible endpoint over every machine you own."""

__version__ = "0.1.0"
