"""Checks requests for operations on backends. Pure, except for the function that looks up a node."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

from corral.contract.labels import parse_selector
from corral.controller.backends.rollout import DEFAULT, parse_max_parallel
from corral.kit.errors import Conflict, Invalid, NotFound
from corral.kit.redact import is_redacted
from corral.kit.suggest import did_you_mean
from corral.store.engine.transactions import Transaction
from corral.store.records import BackendRequest, RuleOrigin, Scope, ScopeKind
from corral.store.tables import nodes

_NAME_MAX = 255
_URI_MAX = 4096
_OWN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,199}\Z")  # it becomes the name of a folder


class OperationKind(StrEnum):
    INSTALL = "install"
    UPGRADE = "upgrade"
    DELETE = "delete"
    ROLLBACK = "rollback"


class ConcreteNeedsTarget(Conflict):
    """A build for one kind of machine was requested for all nodes."""

    code = "concrete_backend_requires_target"

    def __init__(self, message: str, meta_alternative: str) -> None:
        super().__init__(message)
        self.meta_alternative = meta_alternative


@dataclass(frozen=True)
class OperationRequest:
    kind: OperationKind
    backend_request: BackendRequest
    scope: Scope
    force: bool = False
    max_parallel: str = ""
    by: str = ""  # the API key; empty = Corral itself
    origin: RuleOrigin = RuleOrigin.PERSON


def parse_request(
    kind: OperationKind,
    backend_request: BackendRequest,
    *,
    scope: Scope,
    force: bool = False,
    max_parallel: str = "",
    by: str = "",
    origin: RuleOrigin = RuleOrigin.PERSON,
) -> OperationRequest:
    """Raises Invalid for a request that makes no sense."""
    if not backend_request.backend and not backend_request.uri:
        raise Invalid("name a backend, or give a uri")
    for text, most in (
        (backend_request.backend, _NAME_MAX),
        (backend_request.alias, _NAME_MAX),
        (backend_request.uri, _URI_MAX),
    ):
        if len(text) > most:
            raise Invalid(f"{text[:40]!r}… is longer than {most} characters")
        if any(ord(letter) < 0x20 or ord(letter) == 0x7F for letter in text):
            raise Invalid("names must not hold control characters")
    if is_redacted(backend_request.uri):
        raise Invalid(f"{backend_request.uri!r} hides a user and password: write them in place of the stars")
    if backend_request.uri and backend_request.backend and not _OWN_NAME.match(backend_request.backend):
        raise Invalid(
            f"{backend_request.backend!r} cannot be a backend's name: use letters, digits, and . _ + - inside"
        )
    if backend_request.alias and not _OWN_NAME.match(backend_request.alias):
        raise Invalid(f"{backend_request.alias!r} cannot be an alias: use letters, digits, and . _ + - inside")
    if force and kind not in (OperationKind.INSTALL, OperationKind.DELETE):
        raise Invalid("only an install or a delete can be forced")
    if max_parallel:
        max_parallel = parse_max_parallel(max_parallel)
    elif kind is OperationKind.UPGRADE:
        max_parallel = DEFAULT
    return OperationRequest(
        kind=kind,
        backend_request=backend_request,
        scope=scope,
        force=force,
        max_parallel=max_parallel,
        by=by,
        origin=origin,
    )


async def find_scope(tx: Transaction, *, node: str = "", selector: str = "") -> Scope:
    """One node by id or name, nodes by label, or every node."""
    if node and selector:
        raise Invalid("give a node or a selector, not both")
    if selector:
        try:
            terms = parse_selector(selector).terms
        except ValueError as error:
            raise Invalid(str(error)) from error
        if not terms:  # an empty shell variable, perhaps: a request for a few nodes must not reach all
            raise Invalid(f"the selector {selector!r} names no label; leave it out to select every node")
        return Scope(ScopeKind.SELECTOR, selector)
    if not node:
        return Scope(ScopeKind.ALL)
    found = await nodes.find(tx, node) or await nodes.find_by_name(tx, node)
    if found is None:
        names = [outline.name for outline in await nodes.list_outlines(tx)]
        raise NotFound(f"there is no node {node!r}{did_you_mean(node, names)}")
    if found.node_type not in ("", "backend"):
        raise Invalid(f"{found.name} is of type {found.node_type}: it takes no backends")
    return Scope(ScopeKind.NODE, found.id)
