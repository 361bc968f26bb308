"""The models that come with Corral: package data."""

from __future__ import annotations

from importlib.resources import files

from corral.gallery.galleries import BUILT_IN
from corral.gallery.models.entries import ModelIndex, read_model_index


def read_built_in_models() -> ModelIndex:
    """Raises if the package itself is damaged: there is no use going on then."""
    return read_model_index(BUILT_IN, files("corral.gallery.models").joinpath("builtin.yaml").read_bytes())
