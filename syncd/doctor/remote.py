"""Checks of the remote: reached, listed, written, read and deleted; its clock; who writes there.

What is sent lies in a folder of its own, `doctor-<random>`, which daemons pass over. It is removed
again, also after Ctrl-C; what a doctor that was killed has left, the next one removes.
"""

from __future__ import annotations

import os
import re
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from protocol.errors import DataError, ExitCode, RemoteError
from protocol.status import size
from syncd.config import Settings
from syncd.doctor.findings import Finding, from_error, ok, warning, wrong
from syncd.doctor.patient import Patient
from syncd.doctor.writers import look_at_writers
from syncd.rclone.beside import opened
from syncd.rclone.errors import Fatal, Transient, shown
from syncd.rclone.rcd import Rclone
from syncd.rclone.remote import NotFound, RcloneRemote

PROBE_BYTES = 64 * 1024
CLOCK_SECONDS = 60.0
LEFT_SECONDS = 3600.0
CALL_SECONDS = 30.0
_PROBE = re.compile(r"doctor-[0-9a-f]{12}\Z")
_OLDEST_TIME = 1_000_000_000.0  # what is dated before says no time


def check_remote(patient: Patient, stop: threading.Event) -> Iterator[Finding]:
    """Everything that takes the remote."""
    if patient.settings is None or patient.layout is None:
        yield warning("remote", "not looked at, since the settings could not be read")
        return
    try:
        yield from _examine(patient, patient.settings, stop)
    except RemoteError as error:
        if "--bwlimit" not in error.why:
            raise
        told = f"bwlimit = {patient.settings.bwlimit!r} is none that rclone knows"
        yield wrong("settings", told, 'E.g. "10M", or "1M:10M" for up and down.', ExitCode.CONFIG)


def _examine(patient: Patient, settings: Settings, stop: threading.Event) -> Iterator[Finding]:
    with opened(settings) as rclone:
        for name in (settings.remote, *settings.fallback):
            remote = RcloneRemote(rclone, name, treat_as=settings.profile)
            for finding in _examine_one(patient, rclone, remote, shown(name), stop):
                yield replace(finding, remote=shown(name))


def _examine_one(
    patient: Patient, rclone: Rclone, remote: RcloneRemote, name: str, stop: threading.Event
) -> Iterator[Finding]:
    began = time.monotonic()
    try:
        remote.check()
        count = len(remote.list(""))
    except RemoteError as error:
        yield _unreachable(error)
        return
    took = _ms(time.monotonic() - began)
    told = f"{name} ({remote.kind() or 'by environment'})"
    yield ok("remote", f"{told} lists {count} entries in {took}")
    for part in (_there_and_back(rclone, remote, stop), look_at_writers(patient, remote)):
        if stop.is_set():
            return
        try:
            yield from part
        except RemoteError as error:  # it keeps no other remote from being looked at
            yield from_error("remote", error)


def _unreachable(error: RemoteError) -> Finding:
    if isinstance(error, Fatal | Transient):
        found = from_error("remote", error)
        hint = error.hint or "Check the network, and `rclone lsd` with the same remote."
        return wrong("remote", found.found, hint, ExitCode.REMOTE)
    todo = "`syncd watch` makes it; if it should be there, check its name and its mount."
    return warning("remote", f"{error.path}: there is no such folder yet", todo)


def _there_and_back(
    rclone: Rclone, remote: RcloneRemote, stop: threading.Event
) -> Iterator[Finding]:
    """Send an object, list, read and compare it, and delete it."""
    probe = f"doctor-{os.urandom(6).hex()}"
    content = os.urandom(PROBE_BYTES)
    try:
        try:
            yield from _exchange(rclone, remote, probe, content, stop)
        finally:
            # Again when it fails: a remote that was away for a moment must not keep it.
            _remove(remote, probe)
        if any(entry.name == probe for entry in remote.list("")):
            told = "what was deleted is still listed"
            yield warning("deleting", told, f"Delete {probe} there if it stays.")
        else:
            yield ok("deleting", "what was sent is gone again")
    except RemoteError as error:
        found = from_error("there and back", error)
        todo = f"{error.hint} What was sent may have stayed: the folder {probe}".strip()
        yield wrong("there and back", found.found, todo, ExitCode.REMOTE)


def _remove(remote: RcloneRemote, probe: str) -> None:
    try:
        remote.delete_folder(probe)
    except Transient:
        remote.delete_folder(probe)


def _exchange(
    rclone: Rclone, remote: RcloneRemote, probe: str, content: bytes, stop: threading.Event
) -> Iterator[Finding]:
    name = f"{probe}/object"
    with tempfile.TemporaryDirectory(prefix="syncd-doctor-") as folder:
        source = Path(folder) / "object"
        source.write_bytes(content)
        sent = time.time()
        remote.upload(source, name)
        there = time.time()
    if stop.is_set():
        return
    sizes = {entry.name: entry.size for entry in remote.list(probe)}
    if sizes.get("object") not in (PROBE_BYTES, -1):
        told = f"an object of {PROBE_BYTES} bytes is listed as {sizes or 'missing'}"
        todo = "The remote shows late what it has, or alters it; its provider may say more."
        yield warning("there and back", told, todo)
    began = time.time()
    try:
        back = remote.read(name, limit=PROBE_BYTES)
    except (NotFound, DataError) as error:
        back = str(error).encode()
    if back == content:
        took = f"sent in {_ms(there - sent)}, read in {_ms(time.time() - began)}"
        yield ok("there and back", f"{size(PROBE_BYTES)} {took}, the same bytes")
    else:
        told = "what was read is not what was sent"
        todo = "The remote alters files; a `crypt` remote needs the same passwords at both ends."
        yield wrong("there and back", told, todo, ExitCode.DATA)
    yield _clock(rclone, remote, probe, sent, there)
    _remove_left(rclone, remote, probe)


def _clock(rclone: Rclone, remote: RcloneRemote, probe: str, sent: float, there: float) -> Finding:
    """Compare this machine's clock with the time by which the remote has dated the probe."""
    dated = _dated(rclone, remote, probe)
    if dated is None:
        return ok("clock", "the remote does not say what time it is")
    # It was made between `sent` and `there`, and remotes cut off fractions of a second.
    off = max(sent - 1.0 - dated, 0.0) or -max(dated - there, 0.0)
    if abs(off) < CLOCK_SECONDS:
        return ok("clock", "this machine's and the remote's agree")
    sense = "ahead of" if off > 0 else "behind"
    told = f"this machine's is {abs(off):.0f} s {sense} the remote's"
    return warning("clock", told, CLOCK_TODO)


CLOCK_TODO = "Nothing depends on it but the times that people read; turn on time synchronisation."


def _dated(rclone: Rclone, remote: RcloneRemote, probe: str) -> float | None:
    """When the remote says that the probe was made, by its own clock.

    A folder is dated by whoever keeps it. A bucket has none, and there the object is asked for,
    without the time that rclone keeps in its metadata.
    """
    info = rclone.call("operations/fsinfo", {"fs": remote.fs}, CALL_SECONDS)
    params: dict[str, Any] = {"fs": remote.fs, "remote": probe}
    if info["Features"].get("BucketBased"):
        params |= {"remote": f"{probe}/object", "_config": {"UseServerModTime": True}}
    item = rclone.call("operations/stat", params, CALL_SECONDS).get("item") or {}
    return _seconds(item.get("ModTime"))


def _seconds(text: Any) -> float | None:
    """Return an RFC 3339 time in seconds since the epoch; None for none, and for a made-up one."""
    try:
        found = datetime.fromisoformat(str(text))
    except ValueError:
        return None
    seconds = (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()
    return seconds if seconds > _OLDEST_TIME else None


def _remove_left(rclone: Rclone, remote: RcloneRemote, probe: str) -> None:
    """Remove what doctors that were killed have left: by the remote's own times, an hour old."""
    answer = rclone.call(
        "operations/list",
        {"fs": remote.fs, "remote": "", "opt": {"dirsOnly": True}},
        CALL_SECONDS,
    )
    times = {e["Name"]: _seconds(e.get("ModTime")) for e in answer["list"]}
    now = times.get(probe)
    for name, made in times.items():
        if _PROBE.match(name) and now and made and made < now - LEFT_SECONDS:
            remote.delete_folder(name)


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms" if seconds < 10 else f"{seconds:.0f} s"
