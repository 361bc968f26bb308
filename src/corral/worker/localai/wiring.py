"""Builds the parts that serve LocalAI controllers: the file server, orders, and files through an object storage."""

from __future__ import annotations

from typing import TYPE_CHECKING

from corral.kit.clock import Clock
from corral.kit.errors import CorralError
from corral.worker.ingress.routes import IngressRoutes
from corral.worker.localai.file_keys import FileFolders
from corral.worker.localai.file_routes import FileRoutes
from corral.worker.localai.file_sweep import FileSweep
from corral.worker.localai.orders import LocalAIOrders
from corral.worker.localai.uploads import Owner
from corral.worker.settings import WorkerSettings
from corral.worker.status import FatalError
from corral.worker.system.users import BackendUser, find_user
from corral.worker.wiring import BackendParts

if TYPE_CHECKING:
    from corral.worker.localai.file_orders import FileOrders


def mount_file_server(settings: WorkerSettings, routes: IngressRoutes, user: BackendUser) -> None:
    """`user`: the one that backends run as."""
    files = FileRoutes(_folders(settings), limit_bytes=settings.localai.upload_limit_bytes, owner=_owner(user))
    routes.serve_files = files.handle


def make_file_sweep(settings: WorkerSettings, clock: Clock) -> FileSweep:
    return FileSweep(_folders(settings), clock, keep_s=settings.localai.keep_request_files_s)


def make_localai_orders(
    settings: WorkerSettings, backends: BackendParts, user: BackendUser, *, token: str
) -> LocalAIOrders:
    """`token`: the fleet's registration token."""
    return LocalAIOrders(
        settings.localai,
        backends.changes,
        backends.installer,
        backends.supervisor,
        backends.files,
        settings.node.models_dir,
        token=token,
        file_orders=_make_file_orders(settings, user) if settings.storage.is_configured else None,
    )


def _make_file_orders(settings: WorkerSettings, user: BackendUser) -> FileOrders:
    # Imported here: the library of the object storage takes memory that few workers need.
    from corral.blobs.object_store import ObjectStore
    from corral.worker.localai.file_orders import FileOrders

    try:
        store = ObjectStore(settings.storage)
    except CorralError as error:
        raise FatalError(error.message) from error
    return FileOrders(store, _folders(settings), _owner(user))


def _folders(settings: WorkerSettings) -> FileFolders:
    return FileFolders.beside(settings.node.models_dir)


def _owner(backend_user: BackendUser) -> Owner:
    user, _ = find_user(backend_user.name)
    return (user.uid, user.gid) if user is not None else None
