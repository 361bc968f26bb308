"""Who is calling, and what a role may do. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from corral.kit.errors import Denied


class Role(StrEnum):
    ADMIN = "admin"
    VIEWER = "viewer"
    INFERENCE = "inference"
    GATEWAY = "gateway"


@dataclass(frozen=True)
class Principal:
    key_id: str
    name: str
    role: Role
    csrf: str = ""  # only for a web session: what its changing requests must show
    session: str = ""  # hash of the web session's id
    session_ends_at: float = 0.0  # seconds since the epoch; only for a web session
    models: tuple[str, ...] | None = None  # that it may use; None: every one

    def may_use(self, model: str) -> bool:
        return self.models is None or model in self.models


def require(principal: Principal, *roles: Role) -> None:
    """An admin may do whatever a viewer may; nothing else is implied."""
    allowed = {*roles, Role.ADMIN} if Role.VIEWER in roles else set(roles)
    if principal.role not in allowed:
        wanted = " or ".join(sorted(role.value for role in allowed))
        raise Denied(f"this needs a key with role {wanted}; yours has role {principal.role.value}")
