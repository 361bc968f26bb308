"""Values of headers that have parameters: `form-data; name="file"; filename="a.wav"`. Pure.

Takes linear time for any value: the standard library takes seconds for some values of a few kilobytes, and one form may
have a hundred of them.
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
    """The value before the parameters, and the parameters by name, all names in lower case. `name*=utf-8''…` (RFC 5987)
    counts as `name` where that parameter is absent. Raises ValueError for a malformed value or a repeated parameter.
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
            raise ValueError(f"{name} appears twice")
        found[name] = plain if quoted is None else _ESCAPED.sub(r"\1", quoted)
        at = one.end()
    for name in [name for name in found if name.endswith("*")]:
        found.setdefault(name.removesuffix("*"), _extended(found[name]))
    return first.strip().lower(), found


def _extended(text: str) -> str:
    charset, _, rest = text.partition("'")
    _, mark, encoded = rest.partition("'")
    if not mark or charset.lower() not in _CHARSETS:
        raise ValueError("not charset'language'text")
    return unquote(encoded, encoding=charset, errors="replace")
