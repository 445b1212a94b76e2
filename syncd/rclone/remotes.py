"""Several remotes as one: written to the first that answers, read from all.

    Remotes([Lane(bridge), Lane(drive)])

They are in order of preference, and the last is the anchor: the one that outlives the others, where
workers meet (`Remote.anchor`). What one lacks of an end's own objects `syncd.delivery.mirror`
brings there. An object that is on several is listed once.

A remote that fails is left alone for a while and then tried again; a slower one is looked at now
and then only, unless it shows what no faster one does.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from protocol.errors import DataError, RemoteError
from protocol.wire import ObjectName
from syncd.rclone.errors import NotFound
from syncd.rclone.profiles import Profile
from syncd.rclone.remote import Entry, Remote

log = logging.getLogger("syncd")

T = TypeVar("T")

# How long a slower remote is looked at often, after it has shown what no faster one did.
ALERT_SECONDS = 60.0
RETRY_SECONDS = (1.0, 30.0)


class Lane:
    """One of the remotes, and how it does. There may be another way to it than the one given."""

    def __init__(self, remote: Remote) -> None:
        self.remote = remote
        self.failures = 0
        self.retry_at = 0.0
        self.alert_until = 0.0
        # What was listed last of each folder, and when.
        self.listed: dict[str, tuple[float, Sequence[Entry]]] = {}
        self._ways = [remote]

    @property
    def up(self) -> bool:
        """Whether it answered when it was last asked."""
        return self.failures == 0

    @property
    def ways(self) -> int:
        """How many ways to it there are."""
        return len(self._ways)

    def add_way(self, remote: Remote) -> None:
        """Have it reached in another way too, which is tried next if it does not answer.

        The one given stays, and any between is forgotten: a tunnel may have had many URLs.
        """
        self._ways = [self._ways[0], remote]
        if not self.up or self.remote not in self._ways:
            self.remote, self.retry_at = remote, 0.0

    def note_failure(self, failed: Remote, now: float) -> None:
        """Leave it alone for a while, the longer the more often it has failed, and try another
        way then."""
        least, most = RETRY_SECONDS
        self.retry_at = now + min(least * 2**self.failures, most)
        self.failures = min(self.failures + 1, 10)
        self.listed.clear()
        if self.remote is failed:  # else another thread has found out before
            self.remote = self._ways[1 - self._ways.index(failed) if self.ways > 1 else 0]


def _is_right(path: str, digest: hashlib._Hash) -> bool:
    """Whether an object has the hash that its name says; what is no object of ours, always."""
    name = ObjectName.parse(path.rpartition("/")[2])
    return name is None or digest.hexdigest() == name.sha256


class Remotes:
    """Is a `Remote` itself. Safe to use from several threads."""

    def __init__(self, lanes: Sequence[Lane]) -> None:
        self.lanes = list(lanes)
        self._lock = threading.RLock()
        # Called after each upload: to which remote, which path, from which file.
        self.uploaded: Callable[[Remote, str, Path], None] = lambda remote, path, source: None

    # Which of them

    def anchor(self) -> Remote:
        return self.lanes[-1].remote

    @property
    def first(self) -> int:
        """Which of them is written to, as far as is known: the first that answers."""
        return next((at for at, lane in enumerate(self.lanes) if lane.up), len(self.lanes) - 1)

    def _usable(self) -> list[Lane]:
        """The remotes to be asked, in order: those that answer, or the one to be tried next."""
        with self._lock:
            usable = [lane for lane in self.lanes if lane.up]
        return usable or [min(self.lanes, key=lambda lane: lane.retry_at)]

    def probe(self) -> None:
        """Try those that have failed and are due; may take long."""
        now = time.monotonic()
        for lane in self.lanes:
            if not lane.up and lane.retry_at <= now:
                for _ in range(lane.ways):
                    with contextlib.suppress(RemoteError), self._watched(lane) as remote:
                        remote.check()
                        break

    @contextlib.contextmanager
    def _watched(self, lane: Lane) -> Iterator[Remote]:
        """Yield a remote, and take note of how a call to it went."""
        remote = lane.remote
        try:
            yield remote
        except NotFound:
            self._note(lane, remote, None)
            raise
        except RemoteError as error:
            self._note(lane, remote, error)
            raise
        self._note(lane, remote, None)

    def _note(self, lane: Lane, remote: Remote, error: RemoteError | None) -> None:
        with self._lock:
            was_up, before = lane.up, self.first
            if error is None:
                lane.failures = 0
            else:
                lane.note_failure(remote, time.monotonic())
            now_first = self.first
        if was_up and error is not None:
            log.warning("%s", error)
        if now_first != before:
            log.info("what is sent goes to %s now", self.lanes[now_first].remote)

    def _any(self, call: Callable[[Remote], T]) -> T:
        """Return what the first that can says."""
        last: RemoteError | None = None
        for lane in self._usable():
            try:
                with self._watched(lane) as remote:
                    return call(remote)
            except RemoteError as error:
                last = error
        assert last is not None
        raise last

    def _all(self, call: Callable[[Remote], object]) -> None:
        """Ask all of them; an error counts only when all fail."""
        errors: list[RemoteError] = []
        lanes = self._usable()
        for lane in lanes:
            try:
                with self._watched(lane) as remote:
                    call(remote)
            except RemoteError as error:
                errors.append(error)
        if len(errors) == len(lanes):
            raise errors[-1]

    # Reading

    def _listed(self, lane: Lane, folder: str, *, faster: bool) -> Sequence[Entry]:
        """List a folder on one of them; if `faster` ones answer, not each time."""
        now = time.monotonic()
        when, entries = lane.listed.get(folder, (-math.inf, ()))
        profile = lane.remote.profile()
        calm = now > lane.alert_until
        if faster and now - when < (profile.idle_poll_seconds if calm else profile.poll_seconds):
            return entries
        with self._watched(lane) as remote:
            entries = remote.list(folder)
        lane.listed[folder] = (now, entries)
        return entries

    def read(self, path: str, *, limit: int) -> bytes:
        """Return what the first has that has it right; the most there is otherwise."""
        bodies: list[bytes] = []
        last: RemoteError | DataError | None = None
        for lane in self._usable():
            try:
                with self._watched(lane) as remote:
                    body = remote.read(path, limit=limit)
            except (RemoteError, DataError) as error:
                # One that cannot be reached may have it, so it is not known to be gone.
                last = error if last is None or isinstance(last, NotFound) else last
                continue
            if len(body) == limit and _is_right(path, hashlib.sha256(body)):
                return body
            bodies.append(body)
        if bodies:
            return max(bodies, key=len)
        assert last is not None
        raise last

    def download(self, path: str, target: Path, *, length: int) -> None:
        """Take it from the first that has it right."""
        last: RemoteError | DataError | None = None
        for lane in self._usable():
            try:
                with self._watched(lane) as remote:
                    remote.download(path, target, length=length)
                with open(target, "rb") as file:
                    if _is_right(path, hashlib.file_digest(file, "sha256")):
                        return
                target.unlink()
                why = "it is not what its name says"
                raise DataError("read from the remote", path=f"{remote}/{path}", why=why)
            except (RemoteError, DataError) as error:
                # As in `read`: one that cannot be reached, or lacks some of it now, may have it.
                last = error if last is None or isinstance(last, NotFound) else last
        assert last is not None
        raise last

    # Writing

    def upload(self, source: Path, path: str) -> None:
        def upload(remote: Remote) -> None:
            remote.upload(source, path)
            self.uploaded(remote, path, source)

        self._any(upload)

    def replace(self, source: Path, path: str) -> None:
        self._all(lambda remote: remote.replace(source, path))

    def delete(self, folder: str, names: Sequence[str]) -> None:
        self._all(lambda remote: remote.delete(folder, names))

    def delete_folder(self, folder: str) -> None:
        self._all(lambda remote: remote.delete_folder(folder))

    def make_root(self) -> None:
        self._all(lambda remote: remote.make_root())

    # What they are

    def check(self) -> None:
        self._any(lambda remote: remote.check())

    def kind(self) -> str:
        return self.lanes[self.first].remote.kind()

    def profile(self) -> Profile:
        return self.lanes[self.first].remote.profile()

    def hash_kind(self) -> str:
        """That of the anchor; "" while it does not answer, which holds up no other."""
        lane = self.lanes[-1]
        if lane.up:
            with contextlib.suppress(RemoteError), self._watched(lane) as remote:
                return remote.hash_kind()
        return ""

    def hash_of(self, path: str, kind: str) -> str:
        """That of the anchor: what outlives the others is asked."""
        return self.anchor().hash_of(path, kind)

    def local_path(self) -> Path | None:
        """The folder of the first, when it lies on this machine."""
        return self.lanes[0].remote.local_path()

    def each(self) -> Sequence[Remote]:
        """Those of them that answer."""
        return [lane.remote for lane in self.lanes if lane.up]

    # Last, since it hides the type of that name

    def list(self, folder: str) -> list[Entry]:
        found: dict[tuple[str, int], Entry] = {}
        errors: list[RemoteError] = []
        lanes = self._usable()
        for lane in lanes:
            try:
                entries = self._listed(lane, folder, faster=bool(found) or lane is not lanes[0])
            except RemoteError as error:
                errors.append(error)
                continue
            fresh = {(e.name, e.size): e for e in entries}
            if found and fresh.keys() - found.keys():
                lane.alert_until = time.monotonic() + ALERT_SECONDS
            found |= fresh
        if len(errors) == len(lanes):
            raise errors[-1]
        return list(found.values())
