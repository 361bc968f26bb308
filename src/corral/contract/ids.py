"""Identifiers, so that a node's id is never handed where its name is meant."""

from __future__ import annotations

from typing import NewType

NodeId = NewType("NodeId", str)  # UUID v4 text, assigned by the controller
NodeName = NewType("NodeName", str)
KeyId = NewType("KeyId", str)
TokenId = NewType("TokenId", str)
OperationId = NewType("OperationId", str)
ControllerId = NewType("ControllerId", str)
