"""`serve/` as snapshots: made at the controller, unpacked at the worker.

A snapshot is a commit: the worker sees all of it or none. Each is unpacked into a folder of its
own, `.syncd/payload/<order>-<id>/`, which runs keep using after a newer one has come; `serve` at
the worker is a link to the newest.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from protocol.errors import ConfigError, DataError, UserError
from protocol.messages import Content, FileEntry, Message, Snapshot
from protocol.names import safe_relative
from protocol.publish import fsync_dir, make_dirs, temporary_beside
from protocol.snapshots import decode_snapshot, encode_snapshot
from protocol.stages import Stage, parse_stages
from syncd.contents import INLINE_BYTES, Contents, file_sha256
from syncd.files import Found, walk
from syncd.state import State

STAGES_FILE = "stages.toml"


def read_stages(folder: Path) -> dict[str, Stage]:
    """Read a payload's stages. Raises ConfigError when they are missing or wrong."""
    path = folder / STAGES_FILE
    try:
        return parse_stages(path.read_bytes())
    except FileNotFoundError:
        raise ConfigError(
            "read the stages",
            path=path,
            why="there is no such file",
            hint="Define a stage there; examples/ has some.",
        ) from None
    except OSError as error:
        raise ConfigError("read the stages", path=path, why=error.strerror or str(error)) from error


class ServedFolder:
    """The controller's side: `serve/` is watched, and what it is goes out as snapshots."""

    def __init__(self, state: State, root: Path, contents: Contents) -> None:
        self._state = state
        self._root = root
        self._contents = contents
        self.problems: dict[str, str] = {}

    def scan(self) -> int:
        """Note what serve/ is now; return the order of its snapshot, 0 when there is none yet.

        Nothing new is noted while stages.toml is wrong, which raises ConfigError, so that a worker
        never sees it half-edited.
        """
        problems: dict[str, str] = {}
        entries: list[FileEntry] = []
        for found in walk(self._root, "serve"):
            path = found.path.removeprefix("serve/")
            try:
                safe_relative(path)
                entries.append(self._entry(found, path))
            except (OSError, UserError) as error:
                problems[found.path] = f"not served: {error}"
        self.problems = problems
        with self._state.transaction():
            newest = self._newest()
            if not entries and newest is None:
                return 0
            snapshot = encode_snapshot((newest[0] if newest else 0) + 1, entries)
            if newest and newest[1] == snapshot.id:
                return newest[0]
            read_stages(self._root / "serve")
            self._state.run(
                "INSERT INTO snapshots VALUES (?, ?, ?, 0)",
                snapshot.order,
                snapshot.id,
                snapshot.blob,
            )
        return snapshot.order

    def _newest(self) -> tuple[int, str] | None:
        row = self._state.row("SELECT place, id FROM snapshots ORDER BY place DESC LIMIT 1")
        return (int(row[0]), str(row[1])) if row else None

    def _entry(self, found: Found, path: str) -> FileEntry:
        key = (found.size, found.mtime_ns, found.inode)
        row = self._state.row(
            "SELECT size, mtime_ns, inode, sha256 FROM local_files WHERE path = ?", found.path
        )
        # A file that was touched in the same tick as it was hashed may have changed since.
        if row and row[:3] == key and time.time_ns() - found.mtime_ns > 2e9:
            sha256 = str(row[3])
        else:
            sha256 = file_sha256(self._root / found.path)
            self._state.run(
                "INSERT OR REPLACE INTO local_files VALUES (?, ?, ?, ?, ?, ?, 1)",
                found.path,
                *key,
                found.mode,
                sha256,
            )
        mode = 0o755 if found.mode & 0o100 else 0o644
        return FileEntry(path=path, size=found.size, mode=mode, sha256=sha256)

    def pending(self) -> bool:
        """Whether a snapshot waits to be sent."""
        return self._state.row("SELECT 1 FROM snapshots WHERE ready < 2") is not None

    def upload(self) -> None:
        """Bring the larger contents of the newest snapshot to the remote; may take long."""
        row = self._state.row(
            "SELECT place, files FROM snapshots WHERE ready = 0 ORDER BY place DESC LIMIT 1"
        )
        if row is None:
            return
        snapshot = load_snapshot(self._state, int(row[0]))
        for entry in decode_snapshot(snapshot):
            if entry.size > INLINE_BYTES and not self._contents.pieces(entry.sha256):
                try:
                    self._contents.upload(self._root / "serve" / entry.path, entry.sha256)
                except (OSError, DataError):
                    return  # it changed: the next scan makes a newer snapshot
        # Ready is 1 when it can be sent, 2 when it was. What is older and not ready never will be.
        self._state.run("UPDATE snapshots SET ready = 1 WHERE place = ?", snapshot.order)
        self._state.run("DELETE FROM snapshots WHERE ready = 0 AND place < ?", snapshot.order)

    def collect(self, budget: int) -> list[Message]:
        """Return contents that the snapshot sent before did not have, and then the snapshot.

        The worker drops what a snapshot does not name when that snapshot arrives, so a content
        that comes back is sent again.
        """
        row = self._state.row("SELECT place FROM snapshots WHERE ready = 1 ORDER BY place LIMIT 1")
        if row is None:
            return []
        snapshot = load_snapshot(self._state, int(row[0]))
        files = decode_snapshot(snapshot)
        sent = self._state.row("SELECT MAX(place) FROM snapshots WHERE ready = 2")
        there = self._hashes(int(sent[0])) if sent and sent[0] else set()
        order, start = self._state.get("serving", [0, 0])
        start = start if order == snapshot.order else 0
        messages: list[Message] = []
        for at in range(start, len(files)):
            if budget <= 0:
                self._state.put("serving", [snapshot.order, at])
                return messages
            entry = files[at]
            if entry.sha256 in there:
                continue
            there.add(entry.sha256)
            content = self._contents.message(
                self._root / "serve" / entry.path, entry.sha256, entry.size
            )
            if content is None:  # it changed since: the next scan makes a newer snapshot
                self._state.run("DELETE FROM snapshots WHERE place = ?", snapshot.order)
                return messages
            messages.append(content)
            budget -= 512 + len(content.blob)
        messages.append(snapshot)
        self._state.run("UPDATE snapshots SET ready = 2 WHERE place = ?", snapshot.order)
        self._state.run("DELETE FROM snapshots WHERE place < ?", snapshot.order)
        return messages

    def _hashes(self, order: int) -> set[str]:
        files = decode_snapshot(load_snapshot(self._state, order))
        return {entry.sha256 for entry in files}


def load_snapshot(state: State, order: int) -> Snapshot:
    """Return a snapshot that is kept in the state."""
    row = state.row("SELECT id, files FROM snapshots WHERE place = ?", order)
    if row is None:
        raise DataError(f"load snapshot {order}", why="it is not in the state")
    return Snapshot(order=order, id=str(row[0]), blob=bytes(row[1]))


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
        for (order,) in rows:
            if newest and order != newest[0] and order not in wanted:
                continue
            snapshot = load_snapshot(self._state, int(order))
            try:
                self._unpack(snapshot)
            except (DataError, OSError) as error:
                self.problem = f"payload {snapshot.order} is not unpacked: {error}"
                continue
            self.problem = ""
            self._state.run("UPDATE snapshots SET ready = 1 WHERE place = ?", snapshot.order)
        self._point_to_newest()

    def _unpack(self, snapshot: Snapshot) -> None:
        target = self._payload(snapshot.order, snapshot.id).folder
        building = temporary_beside(target)
        try:
            for entry in decode_snapshot(snapshot):
                path = building / entry.path
                make_dirs(path.parent)
                self._contents.place(entry.sha256, path, mode=entry.mode)
            shutil.rmtree(target, ignore_errors=True)
            make_dirs(building)
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
        os.replace(temporary, link)
        fsync_dir(self._root)

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
