"""Mutation operators: small changes of one function, found in its syntax tree and made in its text.

A mutant is named by module, function, operator and ordinal (`corral.controller.health.classify:judge#compare.1`), so
that lines may move and files may be renamed. The change is made in the source text, and not by printing the tree, so
that the diff of a mutant is the one line that differs.
"""

from __future__ import annotations

import ast
import copy
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef

_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_SWAPPED_CALLS = {"min": "max", "max": "min", "any": "all", "all": "any"}
_LOGGERS = {"log", "logger"}


@dataclass(frozen=True)
class Edit:
    """A part of a source file, in bytes, and what stands there in the mutant."""

    start: int
    end: int
    text: str

    def apply(self, source: str) -> str:
        raw = source.encode()
        return (raw[: self.start] + self.text.encode() + raw[self.end :]).decode()


@dataclass(frozen=True)
class Change:
    """One mutation of one function."""

    function: str  # qualified name
    operator: str
    ordinal: int  # among the changes of this operator in this function
    edit: Edit


class SourceText:
    """Where the nodes of a syntax tree stand in their file."""

    def __init__(self, source: str) -> None:
        self._starts = [0]
        for line in source.encode().splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))

    def edit(self, node: ast.expr | ast.stmt, text: str) -> Edit:
        if node.end_lineno is None or node.end_col_offset is None:
            raise ValueError("the node has no position")
        start = self._starts[node.lineno - 1] + node.col_offset
        return Edit(start, self._starts[node.end_lineno - 1] + node.end_col_offset, text)


def functions_in(tree: ast.Module) -> dict[str, FunctionNode]:
    """By qualified name, without `<locals>`: a nested function is `outer.inner`."""
    found: dict[str, FunctionNode] = {}

    def walk(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                name = f"{prefix}{child.name}"
                if not isinstance(child, ast.ClassDef):
                    found.setdefault(name, child)
                walk(child, f"{name}.")
            else:
                walk(child, prefix)

    walk(tree, "")
    return found


def own_nodes(function: FunctionNode) -> Iterator[ast.AST]:
    """The body of a function in the order of its text, without the functions inside it, annotations and docstring."""

    def walk(node: ast.AST) -> Iterator[ast.AST]:
        yield node
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns"):
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST) and not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                    yield from walk(child)

    for statement in function.body:
        if not _is_docstring(statement) and not isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from walk(statement)


def changes_of(name: str, function: FunctionNode, text: SourceText) -> list[Change]:
    """Every mutation of the generic operators."""
    counts: Counter[str] = Counter()
    found = []
    for node in own_nodes(function):
        for operator, edit in _edits(node, text):
            counts[operator] += 1
            found.append(Change(name, operator, counts[operator], edit))
    return found


def matching_edit(function: FunctionNode, text: SourceText, find: str, put: str, ordinal: int = 1) -> Edit | None:
    """The edit that puts `put` where the ordinal-th `find` is: an expression or a statement, compared as syntax and not
    as text. None: the function has no such part."""
    wanted = _parse_part(find)
    seen = 0
    for node in own_nodes(function):
        if isinstance(node, ast.expr | ast.stmt) and type(node) is type(wanted) and ast.dump(node) == ast.dump(wanted):
            seen += 1
            if seen == ordinal:
                return text.edit(node, put)
    return None


def _parse_part(source: str) -> ast.expr | ast.stmt:
    statement = ast.parse(source).body[0]
    return statement.value if isinstance(statement, ast.Expr) else statement


def _edits(node: ast.AST, text: SourceText) -> Iterator[tuple[str, Edit]]:
    match node:
        case ast.Compare(ops=ops):
            for position, op in enumerate(ops):
                if swapped := _COMPARISONS.get(type(op)):
                    yield "compare", _with_op(node, position, swapped(), text)
        case ast.BoolOp(op=op):
            other: ast.boolop = ast.Or() if isinstance(op, ast.And) else ast.And()
            yield "bool", text.edit(node, ast.unparse(ast.BoolOp(op=other, values=node.values)))
        case ast.BinOp(op=ast.Add() | ast.Sub() as op):
            sign: ast.operator = ast.Sub() if isinstance(op, ast.Add) else ast.Add()
            yield "arith", text.edit(node, ast.unparse(ast.BinOp(left=node.left, op=sign, right=node.right)))
        case ast.UnaryOp(op=ast.Not()):
            yield "not", text.edit(node, f"({ast.unparse(node.operand)})")
        case ast.Constant(value=bool() as value):
            yield "constant", text.edit(node, str(not value))
        case ast.Constant(value=int() as value) if value in (0, 1):
            yield "constant", text.edit(node, str(1 - value))
        case ast.Call(func=ast.Name(id=name)) if name in _SWAPPED_CALLS:
            yield "minmax", text.edit(node.func, _SWAPPED_CALLS[name])
        case ast.If(body=[ast.Return() | ast.Continue() | ast.Raise()], orelse=[]):
            yield "guard", text.edit(node, "pass")
        case ast.Expr(value=ast.Call() | ast.Await()) if not _is_log_call(node.value):
            yield "drop", text.edit(node, "pass")
        case ast.AugAssign() | ast.Delete() | ast.Continue() | ast.Break():
            yield "drop", text.edit(node, "pass")
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield "drop", text.edit(node, "pass")
        case _:
            pass


def _with_op(node: ast.Compare, position: int, op: ast.cmpop, text: SourceText) -> Edit:
    other = copy.copy(node)
    other.ops = [op if index == position else each for index, each in enumerate(node.ops)]
    return text.edit(node, ast.unparse(other))


def _is_docstring(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def _is_log_call(value: ast.expr) -> bool:
    """What is logged is no behaviour that a test should hold."""
    call = value.value if isinstance(value, ast.Await) else value
    return (
        isinstance(call, ast.Call)
        and isinstance(call.func, ast.Attribute)
        and isinstance(call.func.value, ast.Name)
        and call.func.value.id in _LOGGERS
    )
