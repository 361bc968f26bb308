"""Where each entry of an archive may go. Pure: a picture of the folder being unpacked, no disk.

Names and links in an archive are a stranger's. Each name is walked through this picture, links included, so that what
is written lands where a container would have it, and never outside. The picture is right because nobody else writes
there and every entry is made as a new one (`unpack.py`): a file system that takes two names for one fails there instead
of following a link.

With `rootfs` the entries are an image's: absolute links start at the image's root and become relative ones, `..` stops
at that root, and the whiteouts of later layers take away what earlier ones brought. A plain archive with such links is
refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from corral.blobs.archives.bounds import MOST_NAME_BYTES, MOST_PARTS
from corral.blobs.archives.entries import Entry, Kind
from corral.blobs.errors import BadArchive, UnsafeArchive

MOST_HOPS = 40  # as the kernel has it
WHITEOUT = ".wh."
OPAQUE = ".wh..wh..opq"
RESERVED = ".wh..wh."


@dataclass(slots=True)
class _Node:
    kind: Kind
    layer: int
    target: str = ""
    latest: int = 0  # of a folder: the last layer that put something into it, however deep
    inside: dict[str, _Node] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Placed:
    """Make `folders` in order, remove what is at `path` if it says so, then make the entry there."""

    path: str  # relative, with /, free of links
    folders: tuple[str, ...] = ()
    remove: bool = False
    target: str = ""  # of a symbolic link: what to write; of a hard link: the path of the file
    keep: bool = False  # a folder that is there already


@dataclass(frozen=True, slots=True)
class Removed:
    """A whiteout: these are no longer there."""

    paths: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Spot:
    """A real folder in the picture."""

    node: _Node
    path: str

    def join(self, name: str) -> str:
        return f"{self.path}/{name}" if self.path else name


class Tree:
    def __init__(self, *, rootfs: bool = False) -> None:
        self._rootfs = rootfs
        self._layer = 0
        self._root = _Spot(_Node(Kind.FOLDER, 0), "")
        self._known: dict[str, _Spot] = {}  # where a parent's name leads, as long as no link changes
        self._cleared: set[str] = set()

    def next_layer(self) -> None:
        self._layer += 1
        self._known.clear()
        self._cleared.clear()

    def put(self, entry: Entry) -> Placed | Removed | None:
        """Where the entry goes, or what it takes away; None for the folder itself. Raises UnsafeArchive, BadArchive."""
        front, name = self._split(entry.name)
        if not name:
            if entry.kind is not Kind.FOLDER:
                raise UnsafeArchive(f"{entry.name[:200]!r} would replace the folder itself")
            return None
        if self._rootfs and name.startswith(WHITEOUT):
            return self._white_out(front, name)
        made: list[str] = []
        spot = self._folder(front, made)
        path = spot.join(name)
        old = spot.node.inside.get(name)
        target = self._target(entry, path)
        if old is not None and old.kind is Kind.FOLDER and entry.kind is Kind.FOLDER:
            old.layer = old.latest = self._layer
            return Placed(path, keep=True)
        if (old is not None and old.kind is not Kind.FILE) or entry.kind is Kind.LINK:
            self._known.clear()
        kind = Kind.FILE if entry.kind is Kind.SAME else entry.kind
        kept = target if kind is Kind.LINK else ""
        spot.node.inside[name] = _Node(kind, self._layer, kept, self._layer)
        return Placed(path, tuple(made), old is not None, target)

    def check_links(self) -> None:
        """Once all is unpacked: no link leads outside, whatever the others on its way point to by now."""
        waiting: list[tuple[_Spot, ...]] = [(self._root,)]
        while waiting:
            way = waiting.pop()
            for name, node in way[-1].node.inside.items():
                if node.kind is Kind.LINK:
                    self._walk(way, node.target.split("/"), way[-1].join(name), pretend=True)
                elif node.kind is Kind.FOLDER:
                    waiting.append((*way, _Spot(node, way[-1].join(name))))

    # Names

    def _split(self, name: str) -> tuple[str, str]:
        """The folder's part and the last part, both free of `.`, `//` and `..`."""
        if "\0" in name or len(name) > MOST_NAME_BYTES:
            raise UnsafeArchive(f"{name[:100]!r}… is no name for a file")
        if name.startswith("/") and not self._rootfs:
            raise UnsafeArchive(f"{name[:200]!r} is an absolute name")
        parts = [part for part in name.split("/") if part not in ("", ".")]
        if ".." in parts:
            raise UnsafeArchive(f"{name[:200]!r} climbs out of its folder")
        if len(parts) > MOST_PARTS:
            raise UnsafeArchive(f"{name[:100]!r}… is {len(parts)} folders deep")
        return "/".join(parts[:-1]), parts[-1] if parts else ""

    def _folder(self, front: str, made: list[str]) -> _Spot:
        """The real folder a parent's name leads to; missing ones come about and are noted in `made`."""
        if (known := self._known.get(front)) is not None:
            return known
        way = self._walk((self._root,), front.split("/"), front, made) or (self._root,)
        for spot in way:
            spot.node.latest = self._layer
        self._known[front] = way[-1]
        return way[-1]

    def _walk(
        self,
        way: Sequence[_Spot],
        parts: Sequence[str],
        what: str,
        made: list[str] | None = None,
        *,
        pretend: bool = False,
    ) -> Sequence[_Spot] | None:
        """The folders on the way from `way` along `parts`, links followed. What is missing is made where the caller
        takes notes in `made`, or taken for a folder with `pretend` (somebody may make it later); else there is none."""
        stack = list(way)
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
            if node is None or node.kind is Kind.FILE:
                if pretend:
                    stack.append(_Spot(_Node(Kind.FOLDER, self._layer), here.join(part)))
                    continue
                if made is None:
                    return None
                if node is not None:
                    raise BadArchive(f"{here.join(part)[:200]!r} is a file, and something is to be put inside it")
                node = here.node.inside[part] = _Node(Kind.FOLDER, self._layer, latest=self._layer)
                made.append(here.join(part))
            if node.kind is Kind.LINK:
                hops += 1
                if hops > MOST_HOPS:
                    raise UnsafeArchive(f"{what[:200]!r} leads around in circles")
                todo.extend(reversed(node.target.split("/")))
            else:
                stack.append(_Spot(node, here.join(part)))
                if len(stack) > MOST_PARTS + 1:
                    raise UnsafeArchive(f"{what[:100]!r}… is more than {MOST_PARTS} folders deep")
        return stack

    # Links

    def _target(self, entry: Entry, path: str) -> str:
        if entry.kind is Kind.LINK:
            return self._link(entry, path)
        if entry.kind is Kind.SAME:
            return self._same(entry, path)
        return ""

    def _link(self, entry: Entry, path: str) -> str:
        """What to write into the link. It may still lead outside by way of other links: `check_links` sees to that."""
        target, depth = entry.target, path.count("/")
        if not target or "\0" in target or len(target) > MOST_NAME_BYTES:
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
        way = self._walk((self._root,), front.split("/"), entry.name)
        node = way[-1].node.inside.get(name) if way else None
        if way is None or node is None or node.kind is not Kind.FILE:
            raise UnsafeArchive(
                f"{entry.name[:200]!r} is to be another name of {entry.target[:200]!r}, no file of this archive"
            )
        found = way[-1].join(name)
        if found == path or found.startswith(f"{path}/"):
            raise BadArchive(f"{entry.name[:200]!r} is to be another name of what it replaces")
        return found

    # Whiteouts

    def _white_out(self, front: str, name: str) -> Removed:
        hidden = name.removeprefix(WHITEOUT)
        if hidden in ("", ".", ".."):
            raise UnsafeArchive(f"{name!r} hides nothing a layer may hide")
        way = self._walk((self._root,), front.split("/"), front)
        # A layer may say the same a million times: each whiteout counts once.
        if (
            way is None
            or (name.startswith(RESERVED) and name != OPAQUE)
            or (said := way[-1].join(name)) in self._cleared
        ):
            return Removed(())
        self._cleared.add(said)
        removed: list[str] = []
        for each in list(way[-1].node.inside) if name == OPAQUE else [hidden]:
            self._clear(way[-1], each, removed)
        if removed:
            self._known.clear()
        return Removed(tuple(removed))

    def _clear(self, spot: _Spot, name: str, removed: list[str]) -> None:
        """Take away what earlier layers brought; what this layer brought itself stays."""
        node = spot.node.inside.get(name)
        if node is None:
            return
        if node.latest < self._layer:
            del spot.node.inside[name]
            removed.append(spot.join(name))
        elif node.kind is Kind.FOLDER:
            for inner in list(node.inside):
                self._clear(_Spot(node, spot.join(name)), inner, removed)


def _clamp(target: str, depth: int) -> str:
    """In a container `..` stops at the root. Only the dots a link begins with can be counted without knowing where the
    rest leads; what leads outside further on is found by `check_links`."""
    parts = target.split("/")
    climbs = 0
    while climbs < len(parts) and parts[climbs] in ("", ".", ".."):
        climbs += 1
    wanted = parts[:climbs].count("..")
    return "/".join([".."] * min(wanted, depth) + parts[climbs:]) or "."
