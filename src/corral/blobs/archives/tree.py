"""Decides where each entry of an archive may go. Pure: a model of the folder that is being unpacked, without disk
access.

Names and links in an archive are untrusted. Each name is resolved in this model, links included, so that an entry is
written where a container would have it, and never outside the folder. The model is correct because no other process
writes into the folder and every entry is created as a new file (`unpack.py`): on a file system that takes two names for
one, creating fails instead of following a link.

With `rootfs` the entries are those of an image: absolute links start at the image's root and become relative, `..`
stops at that root, and whiteouts of later layers remove entries of earlier layers. A plain archive with such links is
refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from corral.blobs.archives.entries import MAX_NAME_BYTES, MAX_PATH_PARTS, Entry, EntryKind
from corral.blobs.errors import BadArchive, UnsafeArchive

MAX_LINK_HOPS = 40  # the kernel's limit
WHITEOUT = ".wh."
OPAQUE = ".wh..wh..opq"
RESERVED = ".wh..wh."


@dataclass(slots=True)
class _TreeNode:
    kind: EntryKind
    layer: int
    target: str = ""
    latest: int = 0  # of a folder: the last layer that put something into it, however deep
    inside: dict[str, _TreeNode] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Placed:
    """Create `folders` in order, remove the entry at `path` if `remove` is set, then create the new entry."""

    path: str  # relative, with /, free of links
    folders: tuple[str, ...] = ()
    remove: bool = False
    target: str = ""  # of a symbolic link: its text; of a hard link: the path of the file
    keep: bool = False  # the folder exists already


@dataclass(frozen=True, slots=True)
class Removed:
    """A whiteout: remove these paths."""

    paths: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _TreeFolder:
    """A folder of the model, with its path."""

    node: _TreeNode
    path: str

    def join(self, name: str) -> str:
        return f"{self.path}/{name}" if self.path else name


class Tree:
    def __init__(self, *, rootfs: bool = False) -> None:
        self._rootfs = rootfs
        self._layer = 0
        self._root = _TreeFolder(_TreeNode(EntryKind.FOLDER, 0), "")
        self._known: dict[str, _TreeFolder] = {}  # parent's name → resolved folder; cleared when a link changes
        self._cleared: set[str] = set()

    def next_layer(self) -> None:
        self._layer += 1
        self._known.clear()
        self._cleared.clear()

    def put(self, entry: Entry) -> Placed | Removed | None:
        """Where the entry goes, or what it removes; None for the folder itself. Raises UnsafeArchive, BadArchive."""
        front, name = self._split(entry.name)
        if not name:
            if entry.kind is not EntryKind.FOLDER:
                raise UnsafeArchive(f"{entry.name[:200]!r} would replace the folder itself")
            return None
        if self._rootfs and name.startswith(WHITEOUT):
            return self._white_out(front, name)
        made: list[str] = []
        spot = self._folder(front, made)
        path = spot.join(name)
        old = spot.node.inside.get(name)
        target = self._target(entry, path)
        if old is not None and old.kind is EntryKind.FOLDER and entry.kind is EntryKind.FOLDER:
            old.layer = old.latest = self._layer
            return Placed(path, keep=True)
        if (old is not None and old.kind is not EntryKind.FILE) or entry.kind is EntryKind.SYMLINK:
            self._known.clear()
        kind = EntryKind.FILE if entry.kind is EntryKind.HARD_LINK else entry.kind
        kept = target if kind is EntryKind.SYMLINK else ""
        spot.node.inside[name] = _TreeNode(kind, self._layer, kept, self._layer)
        return Placed(path, tuple(made), old is not None, target)

    def check_links(self) -> None:
        """After unpacking: raises UnsafeArchive if a link leads outside, now that all other links are known."""
        waiting: list[tuple[_TreeFolder, ...]] = [(self._root,)]
        while waiting:
            path_folders = waiting.pop()
            for name, node in path_folders[-1].node.inside.items():
                if node.kind is EntryKind.SYMLINK:
                    self._walk(path_folders, node.target.split("/"), path_folders[-1].join(name), pretend=True)
                elif node.kind is EntryKind.FOLDER:
                    waiting.append((*path_folders, _TreeFolder(node, path_folders[-1].join(name))))

    # Names

    def _split(self, name: str) -> tuple[str, str]:
        """The folder's part and the last part, both free of `.`, `//` and `..`."""
        if "\0" in name or len(name) > MAX_NAME_BYTES:
            raise UnsafeArchive(f"{name[:100]!r}… is not a valid file name")
        if name.startswith("/") and not self._rootfs:
            raise UnsafeArchive(f"{name[:200]!r} is an absolute name")
        parts = [part for part in name.split("/") if part not in ("", ".")]
        if ".." in parts:
            raise UnsafeArchive(f"{name[:200]!r} climbs out of its folder")
        if len(parts) > MAX_PATH_PARTS:
            raise UnsafeArchive(f"{name[:100]!r}… is {len(parts)} folders deep")
        return "/".join(parts[:-1]), parts[-1] if parts else ""

    def _folder(self, front: str, made: list[str]) -> _TreeFolder:
        """The folder that a parent's name leads to; missing folders are created and appended to `made`."""
        if (known := self._known.get(front)) is not None:
            return known
        path_folders = self._walk((self._root,), front.split("/"), front, made) or (self._root,)
        for spot in path_folders:
            spot.node.latest = self._layer
        self._known[front] = path_folders[-1]
        return path_folders[-1]

    def _walk(
        self,
        start: Sequence[_TreeFolder],
        parts: Sequence[str],
        what: str,
        made: list[str] | None = None,
        *,
        pretend: bool = False,
    ) -> Sequence[_TreeFolder] | None:
        """The folders from `start` along `parts`, links followed. A missing folder is created and appended to `made` if
        that is given, or assumed to exist with `pretend` (a later entry may create it); otherwise the result is
        None."""
        stack = list(start)
        todo = list(reversed(parts))
        hops = 0
        while todo:
            part = todo.pop()
            if part in ("", "."):
                continue
            if part == "..":
                stack.pop()
                if not stack:
                    raise UnsafeArchive(f"{what[:200]!r} leads outside")
                continue
            here = stack[-1]
            node = here.node.inside.get(part)
            if node is None or node.kind is EntryKind.FILE:
                if pretend:
                    stack.append(_TreeFolder(_TreeNode(EntryKind.FOLDER, self._layer), here.join(part)))
                    continue
                if made is None:
                    return None
                if node is not None:
                    raise BadArchive(f"{here.join(part)[:200]!r} is a file, but the archive has entries inside it")
                node = here.node.inside[part] = _TreeNode(EntryKind.FOLDER, self._layer, latest=self._layer)
                made.append(here.join(part))
            if node.kind is EntryKind.SYMLINK:
                hops += 1
                if hops > MAX_LINK_HOPS:
                    raise UnsafeArchive(f"{what[:200]!r} is a loop of links")
                todo.extend(reversed(node.target.split("/")))
            else:
                stack.append(_TreeFolder(node, here.join(part)))
                if len(stack) > MAX_PATH_PARTS + 1:
                    raise UnsafeArchive(f"{what[:100]!r}… is more than {MAX_PATH_PARTS} folders deep")
        return stack

    # Links

    def _target(self, entry: Entry, path: str) -> str:
        if entry.kind is EntryKind.SYMLINK:
            return self._link(entry, path)
        if entry.kind is EntryKind.HARD_LINK:
            return self._same(entry, path)
        return ""

    def _link(self, entry: Entry, path: str) -> str:
        """The text of the link. It may still lead outside through other links: `check_links` finds that."""
        target, depth = entry.target, path.count("/")
        if not target or "\0" in target or len(target) > MAX_NAME_BYTES:
            raise BadArchive(f"{entry.name[:200]!r} is a link to {target[:100]!r}")
        if target.startswith("/"):
            if not self._rootfs:
                raise UnsafeArchive(f"{entry.name[:200]!r} is a link to {target[:200]!r}, an absolute path")
            target = "../" * depth + (target.strip("/") or ".")
        if self._rootfs:
            return _clamp(target, depth)
        for part in target.split("/"):
            if part not in ("", "."):
                depth += -1 if part == ".." else 1
            if depth < 0:
                raise UnsafeArchive(f"{entry.name[:200]!r} is a link to {target[:200]!r}, outside its folder")
        return target

    def _same(self, entry: Entry, path: str) -> str:
        front, name = self._split(entry.target)
        path_folders = self._walk((self._root,), front.split("/"), entry.name)
        node = path_folders[-1].node.inside.get(name) if path_folders else None
        if path_folders is None or node is None or node.kind is not EntryKind.FILE:
            raise UnsafeArchive(
                f"{entry.name[:200]!r} is a hard link to {entry.target[:200]!r}, which is not a file of this archive"
            )
        found = path_folders[-1].join(name)
        if found == path or found.startswith(f"{path}/"):
            raise BadArchive(f"{entry.name[:200]!r} is a hard link to the file that it replaces")
        return found

    # Whiteouts

    def _white_out(self, front: str, name: str) -> Removed:
        hidden = name.removeprefix(WHITEOUT)
        if hidden in ("", ".", ".."):
            raise UnsafeArchive(f"{name!r} is not a valid whiteout")
        path_folders = self._walk((self._root,), front.split("/"), front)
        # A layer may repeat a whiteout a million times: each is applied once.
        if (
            path_folders is None
            or (name.startswith(RESERVED) and name != OPAQUE)
            or (said := path_folders[-1].join(name)) in self._cleared
        ):
            return Removed(())
        self._cleared.add(said)
        removed: list[str] = []
        for each in list(path_folders[-1].node.inside) if name == OPAQUE else [hidden]:
            self._clear(path_folders[-1], each, removed)
        if removed:
            self._known.clear()
        return Removed(tuple(removed))

    def _clear(self, spot: _TreeFolder, name: str, removed: list[str]) -> None:
        """Remove entries of earlier layers; entries of this layer stay."""
        node = spot.node.inside.get(name)
        if node is None:
            return
        if node.latest < self._layer:
            del spot.node.inside[name]
            removed.append(spot.join(name))
        elif node.kind is EntryKind.FOLDER:
            for inner in list(node.inside):
                self._clear(_TreeFolder(node, spot.join(name)), inner, removed)


def _clamp(target: str, depth: int) -> str:
    """In a container `..` stops at the root. Only leading dots can be counted without resolving the rest of the link;
    `check_links` finds links that lead outside later on."""
    parts = target.split("/")
    climbs = 0
    while climbs < len(parts) and parts[climbs] in ("", ".", ".."):
        climbs += 1
    wanted = parts[:climbs].count("..")
    return "/".join([".."] * min(wanted, depth) + parts[climbs:]) or "."
