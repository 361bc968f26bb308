"""The error that ends the worker: nothing but a person can mend it, so it is one sentence that says how."""

from __future__ import annotations

from corral.kit.errors import CorralError


class CannotGoOn(CorralError):
    """`main.run` prints the message on one line and exits 1."""

    code = "cannot_go_on"
