"""One log field, one meaning: `node` is a node's name, `node_id` its id. Whoever searches logs by either finds all."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src" / "corral"
LEVELS = {"debug", "info", "warning", "error", "exception", "critical", "log", "bind"}


def log_calls(tree: ast.AST) -> Iterator[ast.Call]:
    for call in ast.walk(tree):
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr in LEVELS:
            on = call.func.value
            if (isinstance(on, ast.Name) and on.id in ("log", "logger")) or (
                isinstance(on, ast.Attribute) and on.attr in ("log", "_log")
            ):
                yield call


def last_words(value: ast.expr) -> Iterator[str]:
    """What an expression calls the thing it stands for: `row.node_id` → node_id."""
    match value:
        case ast.Name(id=word) | ast.Attribute(attr=word):
            yield word
        case ast.BoolOp(values=values):
            for each in values:
                yield from last_words(each)
        case ast.IfExp(body=body, orelse=orelse):
            yield from last_words(body)
            yield from last_words(orelse)
        case ast.Call(func=ast.Name(id="str"), args=[inner]) | ast.Subscript(value=inner):
            yield from last_words(inner)


def is_id(word: str) -> bool:
    return word == "id" or word.endswith("_id")


def faults(text: str, where: str = "") -> list[str]:
    found = []
    for call in log_calls(ast.parse(text)):
        for field in call.keywords:
            words = list(last_words(field.value))
            if field.arg == "node" and any(map(is_id, words)):
                found.append(f"{where}:{call.lineno}: node= is {words[0]}: an id goes by node_id=")
            if field.arg == "node_id" and words and not all(map(is_id, words)):
                found.append(f"{where}:{call.lineno}: node_id= is {words[0]}: a name goes by node=")
    return found


def test_node_is_a_name_and_node_id_an_id_in_every_log_call() -> None:
    found = [
        fault
        for path in sorted(SOURCE.rglob("*.py"))
        for fault in faults(path.read_text(), str(path.relative_to(SOURCE)))
    ]
    assert found == []


def test_the_check_itself_sees_what_it_should() -> None:
    assert len(faults("log.info('x', node=row.node_id)")) == 1
    assert len(faults("log.info('x', node=node.id or 'nobody')")) == 1
    assert len(faults("self._log.warning('x', node_id=node.name)")) == 1
    assert faults("log.info('x', node=node.name, node_id=row.node_id)\nstart(node=row.node_id)") == []
