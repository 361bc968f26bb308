"""The operations of uploads of a controller of `backend_fleet.py`, with a leader that notices silence soon."""

from __future__ import annotations

from corral.controller.backends.reconcile import LEASE
from corral.controller.files.upload_operations import UploadOperations
from tests.support.backend_fleet import Controller


def upload_operations_of(
    controller: Controller, *, kept_s: float = 3600.0, silent_s: float = 20.0, alive_s: float = 10.0
) -> UploadOperations:
    return UploadOperations(
        controller.store,
        controller.bus,
        controller.backends.progress,
        controller.leadership,
        controller.feed,
        controller.backends.progress._clock,
        lease=LEASE,
        kept_s=kept_s,
        silent_s=silent_s,
        alive_s=alive_s,
        interval_s=0.05,
    )
