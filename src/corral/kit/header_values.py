"""Values of headers that have parameters: `form-data; name="file"; filename="a.wav"`. Pure.

Linear in their length, whatever they hold: the standard library takes seconds for some of a few kilobytes, and whoever
sends a form may send a hundred of them.
"""

from __future__ import annotations

import re
from urllib.parse import unquote

_NOTHING = re.compile(r"[ \t;]++")
_PARAMETER = re.compile(
    r"([!#$%&'*+.^_`|~0-9A-Za-z-]++)[ \t]*+=[ \t]*+"
    r'(?:"((?:[^"\\]|\\.)*+)"|([^;" \t]*+))[ \t]*+(?:;|\Z)',
    re.DOTALL,
)
_ESCAPED = re.compile(r"\\(.)", re.DOTALL)
_CHARSETS = ("utf-8", "iso-8859-1", "us-ascii")


def read_parameters(value: str) -> tuple[str, dict[str, str]]:
    """What it says before them, in lower case, and each parameter by its name, in lower case. `name*=utf-8''…` (RFC
    5987) counts as `name` where that is not said plainly. Raises ValueError for what cannot be read, or is twice there.
    """
    first, _, rest = value.partition(";")
    found: dict[str, str] = {}
    at = 0
    while at < len(rest):
        if (nothing := _NOTHING.match(rest, at)) is not None:
            at = nothing.end()
            continue
        one = _PARAMETER.match(rest, at)
        if one is None:
            raise ValueError("not name=value")
        name, quoted, plain = one.groups()
        if (name := name.lower()) in found:
            raise ValueError(f"{name} is said twice")
        found[name] = plain if quoted is None else _ESCAPED.sub(r"\1", quoted)
        at = one.end()
    for name in [name for name in found if name.endswith("*")]:
        found.setdefault(name.removesuffix("*"), _extended(found[name]))
    return first.strip().lower(), found


def _extended(text: str) -> str:
    charset, _, rest = text.partition("'")
    _, mark, told = rest.partition("'")
    if not mark or charset.lower() not in _CHARSETS:
        raise ValueError("not charset'language'text")
    return unquote(told, encoding=charset, errors="replace")
