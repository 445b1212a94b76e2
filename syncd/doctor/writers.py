"""Checks of who writes on the remote: the other end's key, doubled and foreign writers, objects.

Read as the daemon reads them, and nothing is noted: the daemon's own state is looked at, not used.
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from protocol.errors import DataError, ExitCode, RefusedError, UserError
from protocol.paths import Layout
from protocol.status import duration, gone_after
from protocol.wire import Kind, ObjectName, Role, Writer
from syncd.config import previous_sealer, sealer
from syncd.doctor.findings import Finding, from_error, ok, warning, wrong
from syncd.doctor.patient import Patient
from syncd.rclone.remote import NotFound, RcloneRemote
from syncd.view import is_watched, read_age, read_status

MANY_OBJECTS = 1000
LOOKED_INTO = 12
OPENED_BYTES = 4 * 1024 * 1024
TRIES = 3
CLOCK_SECONDS = 60.0
FRESH_SECONDS = 60.0


@dataclass
class _Folder:
    """A writer's folder on the remote; `refused` is why its objects do not open, "" if they do."""

    writer: Writer
    objects: int
    refused: RefusedError | None
    opened: bool


@dataclass
class _Own:
    """What this end's state says: its own writer, and those that it knows."""

    writer: Writer | None = None
    known: set[Writer] = field(default_factory=set)


def look_at_writers(patient: Patient, remote: RcloneRemote) -> Iterator[Finding]:
    """Yield what the remote tells of both ends' writers."""
    role, layout = patient.role, patient.layout
    assert role is not None
    assert layout is not None
    try:
        own = _own(layout)
    except DataError as error:
        yield from_error("state", error)
        own = _Own()
    found = [Writer.parse(entry.name) for entry in remote.list("") if entry.is_dir]
    writers = sorted(writer for writer in found if writer is not None)
    folders = [_look_into(patient, remote, writer) for writer in writers[-LOOKED_INTO:]]
    yield _objects(folders, len(writers))
    if "key" not in patient.errors:
        yield _peer(role.peer, [f for f in folders if f.writer.role is role.peer])
        yield _doubled(own, [f for f in folders if f.writer.role is role])


def _own(layout: Layout) -> _Own:
    """Read the daemon's state beside it. Raises DataError when it is damaged."""
    path = layout.private / "state.db"
    if not path.exists():
        return _Own()
    try:
        with contextlib.closing(
            sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True, timeout=10.0)
        ) as database:
            (sound,) = database.execute("PRAGMA quick_check(1)").fetchone()
            if sound != "ok":
                raise DataError("read the state", path=path, why=str(sound), hint=_ANEW)
            row = database.execute("SELECT value FROM meta WHERE key = 'writer'").fetchone()
            known = [Writer.parse(n) for (n,) in database.execute("SELECT writer FROM peers")]
    except sqlite3.Error as error:
        raise DataError("read the state", path=path, why=str(error), hint=_ANEW) from error
    writer = Writer.parse(json.loads(row[0])) if row else None
    return _Own(writer, {each for each in known if each is not None})


_ANEW = "If it is damaged, move .syncd/state.db away: what was sent is read from the remote."


def _look_into(patient: Patient, remote: RcloneRemote, writer: Writer) -> _Folder:
    """List a writer's folder, and try to open its newest object that is not too large."""
    listed = [ObjectName.parse(e.name) for e in remote.list(str(writer)) if not e.is_dir]
    names = sorted((name for name in listed if name is not None), reverse=True)
    folder = _Folder(writer, len(names), None, opened=False)
    small = [n for n in names if n.kind is not Kind.CHUNK and n.length <= OPENED_BYTES]
    for name in small[:TRIES]:
        try:
            body = remote.read(f"{writer}/{name}", limit=name.length)
            _open(patient, writer, name, body)
        except (NotFound, DataError):
            continue  # deleted meanwhile, or not whole yet
        except RefusedError as error:
            folder.refused = error
            continue
        return _Folder(writer, len(names), None, opened=True)
    return folder


def _open(patient: Patient, writer: Writer, name: ObjectName, body: bytes) -> None:
    """Open an object by this end's key, or the one before. Raises RefusedError, DataError."""
    previous = previous_sealer(patient.key)
    try:
        sealer(patient.key).open(writer, name, body)
    except RefusedError:
        if previous is None:
            raise
        previous.open(writer, name, body)


def _objects(folders: Sequence[_Folder], writers: int) -> Finding:
    count = sum(folder.objects for folder in folders)
    told = f"{count} objects of {writers} writers lie there"
    full = [str(f.writer) for f in folders if f.objects > MANY_OBJECTS]
    if full:
        todo = "Start the daemon that writes there: it puts a few in the place of many."
        return warning("objects", f"{told}; over {MANY_OBJECTS} of {', '.join(full)}", todo)
    return ok("objects", told)


def _peer(role: Role, folders: Sequence[_Folder]) -> Finding:
    """Whether the newest writer of the other end seals with a key that this end has."""
    if not folders:
        return ok("other end", f"no {role} has written there yet")
    newest = folders[-1]
    if newest.opened:
        return ok("other end", f"{newest.writer} writes there, with the same key")
    if newest.refused is not None:
        told = f"{newest.writer} cannot be heard: {newest.refused.why}"
        todo = newest.refused.hint or "Copy .syncd/key from the controller's end to the worker's."
        return wrong("other end", told, todo, ExitCode.REFUSED)
    return warning("other end", f"{newest.writer} has no object there that could be opened")


def _doubled(own: _Own, folders: Sequence[_Folder]) -> Finding:
    """Whether another writer of this end's role is at work, or somebody pretends to be one."""
    newer = [f.writer for f in folders if f.opened and own.writer and f.writer > own.writer]
    if newer:
        told = f"{newer[-1]} has taken over from this end, {own.writer}"
        todo = "Stop the other one and remove .syncd/ here to take it back, or leave it to it."
        return wrong("writers", told, todo, ExitCode.REFUSED)
    foreign = [str(f.writer) for f in folders if f.refused is not None]
    if foreign:
        told = f"not sealed by this end's key: {', '.join(foreign)}"
        todo = "Somebody else writes on this remote: give it a folder of its own, or delete them."
        return warning("writers", told, todo)
    if own.writer is None:
        return ok("writers", "this end has not written there yet")
    return ok("writers", f"{own.writer} is this end; nobody else writes in its place")


def check_worker(patient: Patient, stop: threading.Event) -> Iterator[Finding]:
    """When the worker was heard last, and whether its clock is right, by its newest heartbeat."""
    layout = patient.layout
    if layout is None or patient.role is not Role.CONTROLLER:
        return  # a controller sends no heartbeat
    try:
        status, age = read_status(layout), read_age(layout)
    except UserError as error:
        yield from_error("worker", error)
        return
    if status is None or age is None:
        yield ok("worker", "none was heard of yet")
        return
    told = f"{status.worker} on {status.host} was heard {duration(age)} ago"
    if status.leaving:
        yield ok("worker", f"{told}; it has left: {status.leaving}")
    elif age > gone_after(status):
        todo = "The VM, or its connection, may be gone: look there, or start another worker."
        yield warning("worker", told, todo)
    else:
        yield ok("worker", told)
    came = time.time() - age
    ahead = status.time - came
    if ahead > CLOCK_SECONDS:
        told = f"the worker's is {ahead:.0f} s ahead of this machine's"
    elif -ahead > CLOCK_SECONDS and age < FRESH_SECONDS and is_watched(layout):
        told = f"the worker's is {-ahead:.0f} s behind, or its heartbeat was so long on its way"
    else:
        return
    yield warning("clock", told, "Nothing depends on it but the times that people read.")
