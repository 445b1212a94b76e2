"""Checks of this end's folder: settings, key, rights, file system, space, stages, daemon."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from protocol.errors import BusyError, ExitCode, UserError
from protocol.paths import Layout
from protocol.publish import publish_bytes
from protocol.status import duration, size
from protocol.wire import Role
from syncd.config import NAMES, Settings
from syncd.delivery.payload import read_stages
from syncd.doctor.findings import Finding, from_error, ok, warning, wrong
from syncd.doctor.patient import Patient
from syncd.platform import (
    exclusive_lock,
    filesystem_type,
    free_inodes,
    has_modes,
    is_ours,
    takes_long_paths,
)
from syncd.rclone.errors import shown, without_secrets
from syncd.view import is_watched, read_problems, read_status
from syncd.watch import needs_polling

NO_SPACE, LITTLE_SPACE = 64 * 1024 * 1024, 1024 * 1024 * 1024
LITTLE_INODES = 10_000
LONG_ROOT = 100


def check_folder(patient: Patient, stop: threading.Event) -> Iterator[Finding]:
    """The folder, its settings and its key, as they were read."""
    for name in ("folder", "settings", "key"):
        if name in patient.errors:
            yield from_error(name, patient.errors[name])
    if patient.layout and patient.settings:
        settings = patient.settings
        told = f"{patient.layout.root} is the {settings.role}'s end of {shown(settings.remote)}"
        yield ok("folder", f"{told}{_overridden()}")
    if patient.layout:
        yield from _misplaced(patient.layout)
        if "key" not in patient.errors:
            yield _key_finding(patient)


def _misplaced(layout: Layout) -> Iterator[Finding]:
    """Yield what is a file and should be a folder, or the other way round: nothing can start."""
    for path in (layout.private, layout.inbox, layout.serve):
        if path.exists() and not path.is_dir():
            told = f"{path} is a file, and has to be a folder"
            yield wrong("folder", told, "Move it away; `syncd watch` makes it.", ExitCode.CONFIG)
    if layout.queue.is_dir():
        told = f"{layout.queue} is a folder, and has to be a file"
        yield wrong("folder", told, "Move it away, and run `syncd init`.", ExitCode.CONFIG)


def _overridden() -> str:
    found = [name for each in NAMES if os.environ.get(name := f"SYNCD_{each.upper()}")]
    return f"; set by the environment: {', '.join(found)}" if found else ""


def _key_finding(patient: Patient) -> Finding:
    key = patient.key
    if key is None:
        return _keyless(patient)
    if key.previous:
        told = f"of folder {key.folder}; it is being rotated, and the one before opens still"
        return warning("key", told, "Give the other end the new one, and restart both daemons.")
    return ok("key", f"of folder {key.folder}, well-formed")


def _keyless(patient: Patient) -> Finding:
    worker = patient.role is Role.WORKER
    todo = "Make both ends anew without --unsealed."
    if worker:
        todo = "Give it the key: in SYNCD_KEY the text of the controller's .syncd/key, or a copy "
        todo += "by `syncd init --role worker --key-file COPY`."
    if patient.settings is None or patient.settings.unsealed:
        told = "there is none: whoever can write to the remote can run code on the worker"
        return warning("key", told, todo)
    told = "there is none, and `syncd watch` does not start without"
    todo = todo if worker else "`syncd init` makes one, of which the worker needs a copy."
    return wrong("key", told, todo, ExitCode.CONFIG)


def check_rights(patient: Patient, stop: threading.Event) -> Iterator[Finding]:
    """Who can read what is secret, and whether this user can write what it must."""
    layout, settings = patient.layout, patient.settings
    if layout is None:
        return
    findings = [*_not_writable(layout, patient.role), *_too_open(layout, settings)]
    yield from findings or [ok("rights", "secrets are this user's alone; folders can be written")]


def _not_writable(layout: Layout, role: Role | None) -> Iterator[Finding]:
    folders = [layout.private, layout.inbox]
    folders += [layout.serve, layout.queue] if role is Role.CONTROLLER else []
    for path in folders:
        if path.exists() and not os.access(path, os.W_OK):
            todo = f"chown it to this user, or run syncd as the user who owns {layout.root}."
            yield wrong("rights", f"{path} cannot be written by this user", todo, ExitCode.CONFIG)


def _too_open(layout: Layout, settings: Settings | None) -> Iterator[Finding]:
    """Yield what others can read and should not."""
    if not has_modes():
        return
    secrets = [layout.private, layout.key]
    if _holds_password(layout.settings):
        secrets.append(layout.settings)
    for path in secrets:
        if todo := _closing(path):
            yield wrong("rights", f"other users can look at {path}", todo, ExitCode.CONFIG)
    if layout.private.is_dir() and not is_ours(layout.private.stat()):
        yield warning("rights", f"{layout.private} belongs to another user")
    config = settings.rclone_config if settings else ""
    if config and (todo := _closing(Path(config))):
        yield warning("rights", f"other users can look at {config}, rclone's passwords", todo)


def _holds_password(path: Path) -> bool:
    """Whether a file of settings has a password in it, of any remote."""
    try:
        text = path.read_text("utf-8")
    except (OSError, ValueError):
        return False  # that it cannot be read is told elsewhere
    return without_secrets(text) != text


def _closing(path: Path) -> str:
    """Return the command that closes a file or folder to other users; "" for what is closed."""
    with contextlib.suppress(OSError):  # that it cannot be looked at is told elsewhere
        mode = path.stat().st_mode
        if stat.S_IMODE(mode) & 0o077:
            return f"chmod {'700' if stat.S_ISDIR(mode) else '600'} '{path}'"
    return ""


def check_disk(patient: Patient, stop: threading.Event) -> Iterator[Finding]:
    """Space and inodes of the folder's disk."""
    if patient.layout is None:
        return
    root = patient.layout.root
    free, inodes = shutil.disk_usage(root).free, free_inodes(root)
    told = f"{size(free)} free" + (f", room for {inodes:,} files" if inodes is not None else "")
    if free < NO_SPACE or inodes == 0:
        yield wrong("disk", told, f"Make room on the disk of {root}.", ExitCode.DATA)
    elif free < LITTLE_SPACE or (inodes is not None and inodes < LITTLE_INODES):
        yield warning("disk", told, f"Make room on the disk of {root} soon.")
    else:
        yield ok("disk", told)


def check_filesystem(patient: Patient, stop: threading.Event) -> Iterator[Finding]:
    """Whether the folder's file system does what we rely on; tried out in `.syncd`."""
    if patient.layout is None or not patient.layout.private.is_dir():
        return
    private = patient.layout.private
    kind = filesystem_type(private) or "of unknown type"
    try:
        alike = _try_out(private)
    except PermissionError:
        yield warning("file system", f"{kind}: not tried out, for this user may not write there")
        return
    except (OSError, BusyError) as error:
        told = f"{kind}: a file cannot be made, synced, renamed and locked there: {error}"
        full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
        todo = "Make room on it." if full else "Put the folder on a local disk."
        yield wrong("file system", told, todo, ExitCode.DATA)
        return
    if needs_polling(patient.layout.root):
        told = f"{kind}: a network or FUSE mount, where changes are looked for each second"
        yield warning("file system", told, "A local disk is quicker, and its locks hold.")
    elif alike:
        told = f"{kind}: names that differ only in case are one file"
        todo = "Keep names in serve/ and of artefacts apart by more than case."
        yield warning("file system", told, todo)
    else:
        yield ok("file system", f"{kind}: fsync, rename and locks work, case counts")
    if len(str(patient.layout.root)) > LONG_ROOT and not takes_long_paths():
        told = "its path is long, and this system refuses paths of over 260 characters"
        yield warning("file system", told, "Move it nearer to the drive, or allow long paths.")


def _try_out(private: Path) -> bool:
    """Make, sync, rename over and lock a file; return whether case does not count."""
    with tempfile.TemporaryDirectory(prefix="doctor-", suffix=".tmp", dir=private) as name:
        folder = Path(name)
        for content in (b"old", b"new"):
            publish_bytes(folder / "probe", content)
        if (folder / "probe").read_bytes() != b"new":
            raise OSError("a rename did not replace the file")
        with exclusive_lock(folder / "lock", "try a lock"):
            _check_locks(folder / "lock")
        return (folder / "PROBE").exists()


def _check_locks(path: Path) -> None:
    """Raise OSError when a lock that is held can be had a second time."""
    try:
        with exclusive_lock(path, "try a lock"):
            raise OSError("a lock does not keep a second holder out")
    except BusyError:
        return


def check_stages(patient: Patient, stop: threading.Event) -> Iterator[Finding]:
    """serve/stages.toml."""
    if patient.layout is None or patient.settings is None:
        return
    serve = patient.layout.serve
    if patient.role is Role.WORKER and not serve.exists():
        yield ok("stages", "no payload has come from the controller yet")
        return
    stages = read_stages(serve)
    yield ok("stages", f"stages.toml defines {', '.join(sorted(stages)) or 'none'}")


def check_daemon(patient: Patient, stop: threading.Event) -> Iterator[Finding]:
    """Whether a daemon runs for this folder, when it did something, and what it has told."""
    layout = patient.layout
    if layout is None or patient.settings is None:
        return
    running, idle = is_watched(layout), _idle_seconds(layout)
    told = "" if idle is None else f"; it last did something {duration(idle)} ago"
    if running is None:
        yield ok("daemon", f"this system does not tell whether `syncd watch` runs{told}")
    elif not running:
        told = f"no `syncd watch` runs for {layout.root}{told}"
        yield warning("daemon", told, "Start it: `syncd watch`")
    else:
        yield ok("daemon", f"`syncd watch` runs{told}")
    yield from _told_by_daemon(layout, patient.role)


def _idle_seconds(layout: Layout) -> float | None:
    """How long ago the daemon last wrote anything of its own."""
    names = ("state.db", "state.db-wal", "status.json", "problems.json")
    times = []
    for name in names:
        with contextlib.suppress(OSError):
            times.append((layout.private / name).stat().st_mtime)
    return max(time.time() - max(times), 0.0) if times else None


def _told_by_daemon(layout: Layout, role: Role | None) -> Iterator[Finding]:
    try:
        problems = read_problems(layout)
        if role is Role.WORKER:
            status = read_status(layout)
            problems = list(status.problems) if status else []
    except UserError as error:
        yield from_error("problems", error)
        return
    for problem in problems:
        yield warning("problems", problem)
    if not problems:
        yield ok("problems", "the daemon has told of none")
