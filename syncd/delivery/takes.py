"""A run's checkpoint folder taken as it is at a moment, though its stage goes on writing.

Its files are linked, and then the folder is looked at once more: if it is still what it was, it was
so at the moment between. A file that was just written may be half of what it is going to be, so all
must have been as they are for a while, and no save be half done (`saves`). In a folder that never
rests, links are left for that while: what was renamed into its place is whole, and what is written
in place shows that it is not.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from protocol.errors import DataError, RefusedError
from protocol.logs import one_line
from syncd.delivery.contents import file_sha256
from syncd.delivery.files import (
    CHECKPOINTS,
    LEFT_OUT,
    SETTLE_SECONDS,
    Found,
    checked_path,
    is_growing,
    walk,
)
from syncd.delivery.holds import Holds
from syncd.delivery.saves import Saves
from syncd.delivery.uploads import changed

# A folder in which something always changes is taken by links after so long.
PATIENCE_SECONDS = 10.0
# So often, before what is written in place is left out, and the group is incomplete.
TRIES = 3
RESTLESS = "it keeps changing in place"

Key = tuple[str, int, int, int, int]
Mark = tuple[int, int, int, int]


def key_of(found: Found) -> Key:
    """Return what tells a file from what it was: links come and go without that."""
    return (found.path, found.size, found.made_ns, found.inode, found.mode)


@dataclass(frozen=True)
class Look:
    """What a run's folder holds: files, and what cannot be taken, path → why."""

    files: tuple[Found, ...]
    missing: Mapping[str, str]

    def same_as(self, other: Look) -> bool:
        """Whether nothing has changed."""
        ours, theirs = ({key_of(f) for f in look.files} for look in (self, other))
        return ours == theirs and self.missing.keys() == other.missing.keys()


def look_at(root: Path, run: str) -> Look:
    """Look at a run's folder. Links, and files that grow, are no part of it."""
    problems: dict[str, str] = {}
    files: list[Found] = []
    for found in walk(root, f"{CHECKPOINTS}/{run}", problems):
        if is_growing(found.path):
            continue
        try:
            checked_path(found.path)
        except RefusedError as error:
            problems[one_line(found.path)] = f"not sent: {error}"
        else:
            files.append(found)
    return Look(tuple(files), {path: why for path, why in problems.items() if why != LEFT_OUT})


@dataclass(slots=True)
class Taken:
    """A file, where it is held now, and what its inode was like then."""

    found: Found
    held: Path
    mark: Mark
    sha256: str = ""


@dataclass
class Snapshot:
    """A run's folder at a moment: all its files, those of them that are new, and what is missing
    in it, path → why."""

    files: Sequence[Found]
    taken: list[Taken]
    missing: dict[str, str]


@dataclass
class _Restless:
    """A folder that does not come to rest: since when, and the links of it that are left."""

    since: float = field(default_factory=time.monotonic)
    tries: int = 0
    began: float = 0.0
    links: Snapshot | None = None


class Takes:
    """Those of a worker."""

    def __init__(self, root: Path, holds: Holds) -> None:
        self._root = root
        self._holds = holds
        self._restless: dict[str, _Restless] = {}
        self._saves = Saves()
        self._copied: set[str] = set()  # runs that write in place what is on its way
        self.unsettled = False  # whether the last round left a folder for the next one

    def take(
        self, run: str, seen: Look, new: Sequence[Found], *, gone: bool, final: bool
    ) -> Snapshot | None:
        """Hold the folder of a run, of which these files are new; None: later.

        `gone` says whether files that were in it are not any more; if it is `final`, the run has
        ended and nobody writes.
        """
        busy = [] if final else [each for each in new if not each.settled(SETTLE_SECONDS)]
        if busy:
            snapshot = self._take_restless(run, seen, new, busy, gone=gone)
        else:
            self._forget(run)
            if not final and self._saves.is_half_done(run, seen.files):
                return None
            snapshot = self._hold(run, seen, new)
        self.unsettled |= snapshot is None
        return snapshot

    def give_up(self, run: str, snapshot: Snapshot) -> None:
        """Let go what was changed in place on its way. The next is copied, if there is room."""
        self._copied.add(run)
        self._drop(snapshot)
        self.unsettled = True

    def _drop(self, snapshot: Snapshot) -> None:
        for each in snapshot.taken:
            self._holds.drop(each.held)

    def _forget(self, run: str) -> None:
        restless = self._restless.pop(run, None)
        if restless and restless.links:
            self._drop(restless.links)

    def _hold(
        self, run: str, seen: Look, new: Iterable[Found], busy: Collection[Found] = ()
    ) -> Snapshot | None:
        """Hold these files, those that are busy by links alone; None when the folder is another
        meanwhile."""
        snapshot = self._held(run, seen, new, busy)
        if look_at(self._root, run).same_as(seen):
            return snapshot
        self._drop(snapshot)
        return None

    def _held(
        self, run: str, seen: Look, new: Iterable[Found], busy: Collection[Found] = ()
    ) -> Snapshot:
        """Hold these files, the newest first."""
        snapshot = Snapshot(seen.files, [], dict(seen.missing))
        for each in sorted(new, key=lambda f: (f.made_ns, f.path), reverse=True):
            path = self._root / each.path
            try:
                if each in busy:
                    held = self._holds.link(path)
                else:
                    held = self._holds.take(path, copied=run in self._copied)
                snapshot.taken.append(Taken(each, held, mark_of(held)))
            except (OSError, DataError) as error:
                snapshot.missing[one_line(each.path)] = f"not sent: {error}"
        return snapshot

    def _take_restless(
        self, run: str, seen: Look, new: Sequence[Found], busy: Sequence[Found], *, gone: bool
    ) -> Snapshot | None:
        restless, now = self._restless.setdefault(run, _Restless()), time.monotonic()
        if now - restless.since < PATIENCE_SECONDS:
            return None
        if links := restless.links:
            if now - restless.began < SETTLE_SECONDS:
                return None
            if all(_rests(each) for each in links.taken):
                del self._restless[run]
                if not self._saves.is_half_done(run, links.files):
                    return links
                self._drop(links)
                return None
            self._drop(links)
            restless.links, restless.tries = None, restless.tries + 1
        if restless.tries < TRIES:
            restless.began, restless.links = now, self._hold(run, seen, new, busy)
            return None
        self._forget(run)
        return self._without(run, seen, new, busy, gone=gone)

    def _without(
        self, run: str, seen: Look, new: Sequence[Found], busy: Sequence[Found], *, gone: bool
    ) -> Snapshot | None:
        """Hold what there is beside files that never rest; None when that is nothing new."""
        settled = [each for each in new if each not in busy]
        if not (settled or gone):
            return None
        missing = {**seen.missing, **{one_line(each.path): RESTLESS for each in busy}}
        left = Look(tuple(each for each in seen.files if each not in busy), missing)
        return self._held(run, left, settled)

    def keep(self, taken: Taken, sha256: str) -> None:
        """Hold a file by the name of its content from now on. Raises OSError, and DataError when
        it was another content before."""
        held = self._holds.keep(taken.held, sha256)
        mark = mark_of(held)
        if taken.sha256 != sha256 if taken.sha256 else mark[:3] != taken.mark[:3]:
            raise changed("send a file", self._root / taken.found.path)
        taken.held, taken.mark, taken.sha256 = held, mark, sha256

    def check(self, taken: Taken) -> None:
        """Raise DataError unless a file still is what it was when it was taken and hashed."""
        try:
            # A stage that prunes changes how many links there are, and so the time of change.
            if mark_of(taken.held) == taken.mark:
                return
            if file_sha256(taken.held, taken.found.size) == taken.sha256:
                return
        except FileNotFoundError:
            if self._holds.has_let_go(taken.held):
                return
        raise changed("send a file", self._root / taken.found.path)


def mark_of(path: Path) -> Mark:
    """Return what shows that a file was written to. Raises OSError."""
    found = path.stat()
    return (found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


def _rests(taken: Taken) -> bool:
    """Whether nobody has written to a file since it was found."""
    found = taken.found
    return mark_of(taken.held)[:3] == (found.inode, found.size, found.made_ns)


def below(run: str, missing: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield what is missing in a run's folder by its path below that."""
    for path, why in missing.items():
        yield path.removeprefix(f"{CHECKPOINTS}/{run}").removeprefix("/") or ".", why
