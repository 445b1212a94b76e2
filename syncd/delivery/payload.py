"""`serve/` as snapshots: made at the controller, unpacked at the worker.

A snapshot is a commit: the worker sees all of it or none. Each is unpacked into a folder of its
own, `.syncd/payload/<order>-<id>/`, which runs keep using after a newer one has come; `serve` at
the worker is a link to the newest.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import logging
import os
import shutil
import threading
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

from protocol.errors import ConfigError, DataError, RefusedError, UserError
from protocol.files import read_regular
from protocol.logs import one_line
from protocol.messages import Content, FileEntry, Message, Snapshot
from protocol.names import safe_relative
from protocol.publish import fsync_dir, remove_leftovers, temporary_beside
from protocol.snapshots import decode_snapshot, each_file, encode_snapshot
from protocol.stages import Stage, parse_stages
from syncd.delivery.contents import INLINE_BYTES, Contents, file_sha256
from syncd.delivery.files import Found, walk
from syncd.delivery.uploads import Source
from syncd.platform import portable_name, sync_disks
from syncd.rclone.remote import NotFound
from syncd.state import State

log = logging.getLogger("syncd")

STAGES_FILE = "stages.toml"
MAX_LOOKS = 5
TICK_SECONDS = 2.0
# So many files are made durable one by one.
FEW_FILES = 100


def read_stages(folder: Path) -> dict[str, Stage]:
    """Read a payload's stages. Raises ConfigError when they are missing or wrong."""
    path = folder / STAGES_FILE
    try:
        return parse_stages(read_regular(path))
    except FileNotFoundError:
        raise ConfigError(
            "read the stages",
            path=path,
            why="there is no such file",
            hint='Define a stage there: [stages.NAME], and below it command = "...".',
        ) from None
    except OSError as error:
        raise ConfigError("read the stages", path=path, why=error.strerror or str(error)) from error


class Ready(IntEnum):
    """How far a snapshot of serve/ is on its way. Of the newer ones each stands for the older."""

    GIVEN_UP = -1  # a file of it was changed before it was sent; the next scan makes a newer one
    NOTED = 0
    COMPLETE = 1  # its larger contents are on the remote
    SENT = 2


@dataclass(frozen=True)
class _Settled:
    """What was found when nothing more was to be noted, and the newest snapshot then."""

    seen: bytes
    order: int
    id: str


@dataclass
class _Serving:
    """The snapshot that is being said, from one pack to the next: there are many of both.

    `files` are those from number `at` on, `there` the contents that were said, or that the
    snapshot `sent` before it had.
    """

    order: int
    sent: int
    at: int
    files: Iterator[FileEntry]
    there: set[str]


_PENDING = (Ready.NOTED, Ready.COMPLETE)


class ServedFolder:
    """The controller's side: `serve/` is watched, and what it is goes out as snapshots."""

    def __init__(self, state: State, root: Path, contents: Contents) -> None:
        self._state = state
        self._root = root
        self._contents = contents
        self._lock = threading.Lock()
        self._serving: _Serving | None = None
        self._seen = b""  # a digest of what was found last, if it had settled
        self._settled: _Settled | None = None
        self.problems: dict[str, str] = {}

    def scan(self) -> int:
        """Note what serve/ is now; return the order of its snapshot, 0 when there is none yet.

        Nothing new is noted while stages.toml is wrong, which raises ConfigError, so that a worker
        never sees it half-edited.
        """
        with self._lock:  # what one thread saw earlier must not be noted after what another saw
            entries = self._look()
            if entries is None:
                assert self._settled is not None
                return self._settled.order
            order = self._note(entries)
            newest = self._newest()
            self._settled = _Settled(self._seen, *newest) if self._seen and newest else None
            return order

    def _note(self, entries: list[FileEntry]) -> int:
        with self._state.transaction():
            newest = self._newest()
            if not entries and newest is None:
                return 0
            snapshot = encode_snapshot((newest[0] if newest else 0) + 1, entries)
            if newest and newest[1] == snapshot.id:
                return newest[0]
            read_stages(self._root / "serve")
            self._state.run(
                "INSERT INTO snapshots VALUES (?, ?, ?, ?)",
                snapshot.order,
                snapshot.id,
                snapshot.blob,
                Ready.NOTED,
            )
        return snapshot.order

    def _look(self) -> list[FileEntry] | None:
        """Return the files as they are at one moment: again, if some changed meanwhile. None when
        nothing has, since the newest snapshot was noted."""
        problems: dict[str, str] = {}
        found = list(walk(self._root, "serve", problems))
        before, newest = _digest(found), self._newest()
        if newest is not None and self._settled == _Settled(before, *newest):
            return None
        self._seen = b""
        for _ in range(MAX_LOOKS):
            # A file that changes again within this moment need not show it.
            settled = all(each.settled(TICK_SECONDS) for each in found)
            entries = self._entries(found, problems)
            before, problems_again = _digest(found), dict[str, str]()
            found = []  # there may be very many: not held twice
            found = list(walk(self._root, "serve", problems_again))
            if _digest(found) == before:
                self._seen = before if settled and not problems else b""
                break
            problems = problems_again
        for path, why in problems.items():
            if self.problems.get(path) != why:
                log.warning("%s: %s", path, why)
        self.problems = problems
        return entries

    def _entries(self, files: Sequence[Found], problems: dict[str, str]) -> list[FileEntry]:
        entries: list[FileEntry] = []
        hashed: list[tuple[Found, str]] = []
        for found in files:
            path = portable_name(found.path.removeprefix("serve/"))
            try:
                safe_relative(path)
                sha256 = self._known_hash(found)
                if sha256 is None:
                    sha256 = file_sha256(self._root / found.path, found.size)
                    hashed.append((found, sha256))
                mode = 0o755 if found.mode & 0o100 else 0o644
                entries.append(FileEntry(path=path, size=found.size, mode=mode, sha256=sha256))
            except (OSError, UserError) as error:
                problems[one_line(found.path)] = f"not served: {error}"
        with self._state.transaction():
            for found, sha256 in hashed:
                self._keep_hash(found, sha256)
        return entries

    def _known_hash(self, found: Found) -> str | None:
        # A file that changed in the tick in which it was hashed may have changed once more.
        if not found.settled(TICK_SECONDS):
            return None
        row = self._state.row(
            "SELECT sha256 FROM local_files WHERE path = ? AND size = ? AND changed_ns = ?"
            " AND inode = ?",
            found.path,
            found.size,
            found.changed_ns,
            found.inode,
        )
        return str(row[0]) if row else None

    def _keep_hash(self, found: Found, sha256: str) -> None:
        self._state.run(
            "INSERT OR REPLACE INTO local_files VALUES (?, ?, ?, ?, ?, ?, 1)",
            found.path,
            found.size,
            found.changed_ns,
            found.inode,
            found.mode,
            sha256,
        )

    def _newest(self) -> tuple[int, str] | None:
        """The order and id of the newest snapshot; one that was given up is equal to none."""
        row = self._state.row("SELECT place, id, ready FROM snapshots ORDER BY place DESC LIMIT 1")
        if row is None:
            return None
        return int(row[0]), "" if row[2] == Ready.GIVEN_UP else str(row[1])

    def pending(self) -> bool:
        """Whether a snapshot waits to be sent."""
        row = self._state.row("SELECT 1 FROM snapshots WHERE ready IN (?, ?)", *_PENDING)
        return row is not None

    def unsent(self) -> int:
        """How many bytes the newest snapshot that waits has yet to bring to the remote."""
        row = self._state.row("SELECT MAX(place) FROM snapshots WHERE ready IN (?, ?)", *_PENDING)
        if row is None or row[0] is None:
            return 0
        sent = max(self.sent(), default=0)
        there = self._hashes(sent) if sent else set()
        there |= self._contents.on_remote()
        order, start = self._state.get("serving", [0, 0])
        files = each_file(load_snapshot(self._state, int(row[0])))
        total = 0
        for entry in itertools.islice(files, start if order == int(row[0]) else 0, None):
            if entry.sha256 not in there:
                there.add(entry.sha256)
                total += entry.size
        return total

    def upload(self) -> None:
        """Bring the larger contents of the newest snapshot to the remote; may take long."""
        row = self._state.row("SELECT MAX(place) FROM snapshots WHERE ready = ?", Ready.NOTED)
        if row is None or row[0] is None:
            return
        snapshot = load_snapshot(self._state, int(row[0]))
        larger = (e for e in each_file(snapshot) if e.size > INLINE_BYTES)
        if self._contents.upload(self._source(entry) for entry in larger):
            self._mark(snapshot.order, Ready.GIVEN_UP)
            return
        self._mark(snapshot.order, Ready.COMPLETE)
        self._state.run(
            "DELETE FROM snapshots WHERE ready = ? AND place < ?", Ready.NOTED, snapshot.order
        )

    def _source(self, entry: FileEntry) -> Source:
        path = self._root / "serve" / entry.path
        return Source(path=path, sha256=entry.sha256, size=entry.size, awaited=True)

    def send_again(self) -> None:
        """Have the newest snapshot sent once more, since contents of it were lost."""
        if sent := self.sent():
            self._mark(sent[-1], Ready.NOTED)

    def _mark(self, order: int, ready: Ready) -> None:
        self._state.run("UPDATE snapshots SET ready = ? WHERE place = ?", ready, order)

    def collect(self, budget: int) -> list[Message]:
        """Return contents that the snapshot sent before did not have, and then the snapshot.

        The worker drops what a snapshot does not name when that snapshot arrives, so a content
        that comes back is sent again.
        """
        coming: list[Message] = [*self._contents.coming()]
        row = self._state.row("SELECT MIN(place) FROM snapshots WHERE ready = ?", Ready.COMPLETE)
        if row is None or row[0] is None:
            self._serving = None
            return coming
        serving = self._to_serve(int(row[0]))
        messages = coming
        while budget > 0:
            entry = next(serving.files, None)
            if entry is None:
                return [*messages, self._served(serving.order)]
            serving.at += 1
            if entry.sha256 in serving.there:
                continue
            serving.there.add(entry.sha256)
            content = self._contents.message(
                self._root / "serve" / entry.path, entry.sha256, entry.size
            )
            if content is None:
                self._mark(serving.order, Ready.GIVEN_UP)
                return messages
            messages.append(content)
            budget -= 512 + len(content.blob)
        self._state.put("serving", [serving.order, serving.at])
        return messages

    def _to_serve(self, order: int) -> _Serving:
        """Return how far a snapshot is said: as it is in the state, if a pack was not made."""
        sent = max(self.sent(), default=0)
        known, start = self._state.get("serving", [0, 0])
        start = start if known == order else 0
        now = self._serving
        if now is None or (now.order, now.sent, now.at) != (order, sent, start):
            files = itertools.islice(each_file(load_snapshot(self._state, order)), start, None)
            there = self._hashes(sent) if sent else set()
            now = self._serving = _Serving(order, sent, start, files, there)
        return now

    def _served(self, order: int) -> Snapshot:
        """Return the message that all of a snapshot's contents were said before."""
        self._mark(order, Ready.SENT)
        self._state.run("DELETE FROM snapshots WHERE place < ? AND ready != ?", order, Ready.SENT)
        return load_snapshot(self._state, order)

    def pack_up(self, wanted: Collection[int]) -> None:
        """Forget snapshots that are neither the newest nor in `wanted`, which runs still use, and
        bring contents of the others to the remote as chunks."""
        kept = {*wanted, *self.sent()[-1:]}
        with self._state.transaction():
            for order in set(self.sent()) - kept:
                self._state.run("DELETE FROM snapshots WHERE place = ?", order)
        # Contents of one that is not sent yet may be on the remote already.
        rows = self._state.rows("SELECT place FROM snapshots")
        self._contents.pack_up(
            (entry.sha256, self._root / "serve" / entry.path)
            for (order,) in rows
            for entry in each_file(load_snapshot(self._state, int(order)))
        )

    def restate(self) -> Iterator[Message]:
        """Yield messages for the snapshots that were sent, each after its contents.

        A content that cannot be had any more belongs to a file that has changed: a newer snapshot
        is on its way.
        """
        for order in self.sent():
            snapshot = load_snapshot(self._state, order)
            said: set[str] = set()
            for entry in each_file(snapshot):
                if entry.sha256 in said:
                    continue
                said.add(entry.sha256)
                content = self._contents.again(entry.sha256, entry.size)
                if content is not None:
                    yield content
            yield snapshot

    def sent(self) -> list[int]:
        """The orders of snapshots that were sent, oldest first."""
        rows = self._state.rows(
            "SELECT place FROM snapshots WHERE ready = ? ORDER BY place", Ready.SENT
        )
        return [int(order) for (order,) in rows]

    def _hashes(self, order: int) -> set[str]:
        return {entry.sha256 for entry in each_file(load_snapshot(self._state, order))}


def _digest(files: Sequence[Found]) -> bytes:
    digest = hashlib.sha256()
    for found in files:
        digest.update(repr(found).encode("utf-8", "surrogateescape"))
    return digest.digest()


def load_snapshot(state: State, order: int) -> Snapshot:
    """Return a snapshot that is kept in the state."""
    row = state.row("SELECT id, files FROM snapshots WHERE place = ?", order)
    if row is None:
        raise DataError(f"load snapshot {order}", why="it is not in the state")
    return Snapshot(order=order, id=str(row[0]), blob=bytes(row[1]))


def _make_durable(folder: Path, files: Sequence[Path]) -> None:
    """Make the files that were written below a folder durable, and itself.

    Few of them each by itself, since other programs may have written much. Many all at once: each
    would take milliseconds.
    """
    if len(files) > FEW_FILES:
        sync_disks()
        return
    for path in files:
        with open(path, "rb") as file:
            os.fsync(file.fileno())
    parents = {parent for path in files for parent in path.parents}
    for each in sorted(parent for parent in parents if parent.is_relative_to(folder)):
        fsync_dir(each)


@dataclass(frozen=True, kw_only=True)
class Payload:
    """A snapshot that is unpacked at the worker."""

    order: int
    folder: Path


class PayloadStore:
    """The worker's side: snapshots that arrived, unpacked."""

    def __init__(self, state: State, root: Path, folder: Path, contents: Contents) -> None:
        self._state = state
        self._root = root
        self._folder = folder
        self._contents = contents
        self.problem = ""
        # Of an earlier daemon that was killed:
        remove_leftovers(root, of="serve")
        for leftover in folder.glob(".*.tmp"):
            shutil.rmtree(leftover, ignore_errors=True)

    def apply(self, message: Content | Snapshot, wanted: Collection[int]) -> None:
        """Keep what a message says, and drop contents that nothing names any more.

        `wanted` are the orders of the snapshots that runs still need. Raises RefusedError when the
        message is malformed or unsafe.
        """
        if isinstance(message, Content):
            self._contents.receive(message)
            return
        needed = {entry.sha256 for entry in decode_snapshot(message)}
        self._state.run(
            "INSERT OR IGNORE INTO snapshots VALUES (?, ?, ?, 0)",
            message.order,
            message.id,
            message.blob,
        )
        for order in wanted:
            if self._state.row("SELECT 1 FROM snapshots WHERE place = ? AND ready = 0", order):
                files = decode_snapshot(load_snapshot(self._state, order))
                needed |= {entry.sha256 for entry in files}
        self._contents.keep_only(needed)

    def newest(self, at_least: int) -> Payload | None:
        """Return the newest unpacked payload, if it is not older than snapshot `at_least`."""
        row = self._state.row(
            "SELECT place, id FROM snapshots WHERE ready = 1 AND place >= ?"
            " ORDER BY place DESC LIMIT 1",
            at_least,
        )
        return self._payload(int(row[0]), str(row[1])) if row else None

    def exactly(self, order: int) -> Payload | None:
        """Return this very payload, if it is unpacked."""
        row = self._state.row("SELECT id FROM snapshots WHERE ready = 1 AND place = ?", order)
        return self._payload(order, str(row[0])) if row else None

    def _payload(self, order: int, snapshot_id: str) -> Payload:
        return Payload(order=order, folder=self._folder / f"{order:06d}-{snapshot_id}")

    def unpack(self, wanted: Collection[int]) -> None:
        """Unpack the newest snapshot, and those in `wanted`; may take long.

        Raises RemoteError when the remote cannot be reached; what else fails is in `problem`.
        """
        rows = self._state.rows("SELECT place FROM snapshots WHERE ready = 0 ORDER BY place DESC")
        newest = self._state.row("SELECT MAX(place) FROM snapshots")
        problems: list[str] = []
        for (order,) in rows:
            if newest and order != newest[0] and order not in wanted:
                continue
            snapshot = load_snapshot(self._state, int(order))
            try:
                self._unpack(snapshot)
            except (NotFound, DataError, RefusedError, OSError) as error:
                problems.append(f"payload {snapshot.order} is not unpacked: {error}")
                continue
            self._state.run("UPDATE snapshots SET ready = 1 WHERE place = ?", snapshot.order)
        self.problem = "; ".join(problems)
        self._point_to_newest()

    def _unpack(self, snapshot: Snapshot) -> None:
        target = self._payload(snapshot.order, snapshot.id).folder
        building = temporary_beside(target)
        try:
            entries = decode_snapshot(snapshot)
            for entry in entries:
                path = building / entry.path
                path.parent.mkdir(parents=True, exist_ok=True)
                self._contents.write(entry.sha256, path, mode=entry.mode, size=entry.size)
            shutil.rmtree(target, ignore_errors=True)
            building.mkdir(exist_ok=True)  # it has no files
            _make_durable(building, [building / entry.path for entry in entries])
            os.replace(building, target)
            fsync_dir(target.parent)
        finally:
            shutil.rmtree(building, ignore_errors=True)

    def _point_to_newest(self) -> None:
        newest = self.newest(0)
        link = self._root / "serve"
        if newest is None or (link.exists() and not link.is_symlink()):
            return
        target = os.path.relpath(newest.folder, self._root)
        if link.is_symlink() and os.readlink(link) == target:
            return
        temporary = temporary_beside(link)
        temporary.symlink_to(target)
        os.replace(temporary, link)  # not durable: the next call mends what a power cut undoes

    def prune(self, wanted: Collection[int]) -> None:
        """Remove payloads older than the newest unpacked one that no run in `wanted` uses."""
        newest = self.newest(0)
        if newest is None:
            return
        rows = self._state.rows("SELECT place, id FROM snapshots WHERE place < ?", newest.order)
        for order, snapshot_id in [(int(o), str(i)) for o, i in rows if int(o) not in wanted]:
            with contextlib.suppress(OSError):
                shutil.rmtree(self._payload(order, snapshot_id).folder)
            self._state.run("DELETE FROM snapshots WHERE place = ?", order)
