"""Shared by all tests: no test may depend on how busy the machine is, nor leave anything behind."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("corral", deadline=None, derandomize=True)
settings.load_profile("corral")
