"""Who is knocking? Pure: decides from what was presented and what is stored (docs/reference/wire/nodes.md#identity).

The worker makes an `enrolment` secret before its first try. So when the reply to that try is lost, the second try is
recognised, and a single-use token is not spent twice.
"""

from __future__ import annotations

from dataclasses import dataclass

from corral.kit.secrets import digest, matches


@dataclass(frozen=True)
class PresentedCredentials:
    """What came with the registration; `bearer` and `body_token` must agree before this is asked."""

    bearer: str
    enrolment: str
    protocol: int


@dataclass(frozen=True)
class KnownNode:
    """The node that has the name now. Two empty hashes mean a person opened the name for a replacement."""

    auth: str  # "token" or "shared"
    token_hash: str
    enrolment_hash: str


@dataclass(frozen=True)
class DeletedNode:
    """A deleted node of that name."""

    token_hash: str
    enrolment_hash: str


@dataclass(frozen=True)
class SameNode:
    needs_token: bool  # it proved itself by its enrolment, so it may never have received its node token


@dataclass(frozen=True)
class ByJoinToken:
    """Welcome if the join token can be claimed. `replaces`: it takes over the name, as a person allowed."""

    replaces: bool


@dataclass(frozen=True)
class NameTaken:
    """The name belongs to another node: 409 if the token is valid, 401 if it is not."""


@dataclass(frozen=True)
class BySharedToken:
    """A LocalAI worker, new or known, under `--compat-localai`."""


@dataclass(frozen=True)
class WasDeleted:
    pass


Identity = SameNode | ByJoinToken | NameTaken | BySharedToken | WasDeleted


def identify(
    presented: PresentedCredentials, on_file: KnownNode | None, buried: DeletedNode | None, shared_token: str
) -> Identity:
    """`shared_token` is empty unless LocalAI workers are let in."""
    shows_shared = bool(shared_token) and presented.protocol == 0 and _same(presented.bearer, shared_token)
    if on_file is None:
        if _is_buried(presented, buried):
            return WasDeleted()
        return BySharedToken() if shows_shared else ByJoinToken(replaces=False)
    if on_file.auth == "shared":
        return BySharedToken() if shows_shared else NameTaken()
    proof = _proves(presented, on_file.token_hash, on_file.enrolment_hash)
    if proof is not None:
        return SameNode(needs_token=proof == "enrolment")
    if _is_buried(presented, buried):  # the name is another machine's by now
        return WasDeleted()
    if not on_file.token_hash and not on_file.enrolment_hash:
        return ByJoinToken(replaces=True)
    return NameTaken()


def _is_buried(presented: PresentedCredentials, buried: DeletedNode | None) -> bool:
    return buried is not None and _proves(presented, buried.token_hash, buried.enrolment_hash) is not None


def _proves(presented: PresentedCredentials, token_hash: str, enrolment_hash: str) -> str | None:
    if token_hash and matches(presented.bearer, token_hash):
        return "token"
    if enrolment_hash and presented.enrolment and matches(presented.enrolment, enrolment_hash):
        return "enrolment"
    return None


def _same(one: str, other: str) -> bool:
    return matches(one, digest(other))
