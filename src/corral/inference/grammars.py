"""`response_format` as the grammar a backend can hold its output to (GBNF, llama.cpp's notation). Pure."""

from __future__ import annotations

from corral.inference.asked import Asked
from corral.inference.refusals import bad

# Any JSON object, with as little white space as a model needs.
JSON_OBJECT = r"""root ::= object
value ::= object | array | string | number | "true" | "false" | "null"
object ::= "{" ws ( pair ( "," ws pair )* )? "}" ws
pair ::= string ":" ws value
array ::= "[" ws ( value ( "," ws value )* )? "]" ws
string ::= "\"" ( [^"\\\x00-\x1f] | "\\" ( ["\\/bfnrt] | "u" hex hex hex hex ) )* "\"" ws
number ::= "-"? ( "0" | [1-9] [0-9]* ) ( "." [0-9]+ )? ( [eE] [-+]? [0-9]+ )? ws
hex ::= [0-9a-fA-F]
ws ::= [ \t\n]?
"""


def grammar_of(asked: Asked) -> str:
    """Empty when the client wants plain text. Raises Refused for a form nobody here could hold to."""
    wanted = asked.mapping("response_format").get("type", "text")
    match wanted:
        case "text":
            return asked.text("grammar")
        case "json_object":
            return JSON_OBJECT
    raise bad(
        "response_format", f"response_format {str(wanted)[:40]!r} is not served by gRPC backends; use json_object."
    )
