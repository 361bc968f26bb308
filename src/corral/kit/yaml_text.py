"""A mapping as the YAML a person would write: one key first, the rest as it came, long texts as such."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def as_yaml(document: Mapping[str, Any], *, first: str = "name") -> str:
    import yaml  # not at the top: whoever only mentions this does not pay for it

    class Dumper(yaml.SafeDumper):
        pass

    def text(dumper: yaml.SafeDumper, value: str) -> yaml.Node:
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)

    Dumper.add_representer(str, text)
    ordered = {key: document[key] for key in sorted(document, key=lambda key: key != first)}
    return str(yaml.dump(ordered, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=120))
