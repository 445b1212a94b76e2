"""Crash points: places where a test can have a process of syncd end by SIGKILL.

`install` wraps what makes a step durable or visible (fsync, rename, SQLite's COMMIT, an upload, a
spawn, ...) in the process that calls it; nothing in syncd knows of it. So no step can be left out,
and a new one is a new point by itself. A point is called

    <role>:<phase>:<step>@<the function of ours that took it>

    worker:after:fsync@syncd.records.JournalFile.add

where role is controller, worker, supervisor or stage (the supervisor's child before it becomes the
stage's program), and phase is before, after, or half (of the bytes of a write, of the time that an
upload takes). Helpers such as `protocol.publish` are passed over: the step is their caller's.

A crash is asked for by a file in `<control>/shots`, named `<id>=<point>=<n>`: the process that
meets the point for the n-th time, counted over all processes, removes the file, appends a line to
`<control>/kills` and is dead. So a shot fires once, whatever is started again. A point may end in
`*`. With n = 0 the shot is for the first point that nobody has died at, of those that differ, for
the one who comes after, from the point before. `<control>/points` lists every point that was met.

The module is loaded into each supervisor: it imports little.
"""

from __future__ import annotations

import contextlib
import io
import os
import signal
import stat
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

OURS = ("syncd.", "protocol.", "faults")
# What takes steps for others, by module and by function.
HELPERS = ("protocol.publish", "syncd.state", "syncd.stages.attempt_files", "syncd.rclone.remote")
HELPING = ("syncd.delivery.link.Link.upload", "syncd.stages.supervisor._say")
# Its steps are its observers' own, and none of them lasts.
NOT_DURABLE = ("syncd.watch",)
# After these the disk is, without a power cut, as it was before them, but for an empty new file.
NOTHING_NEW = ("before:", "after:fsync", "after:create", "after:mkdir")
_WRITES = ("INSERT", "UPDATE", "DELETE", "COMMIT")

# The system's own, before anything is wrapped.
_open, _write, _close, _fstat = os.open, os.write, os.close, os.fstat
_unlink, _listdir, _kill = os.unlink, os.listdir, os.kill


class Layer:
    """The crash points of one process."""

    def __init__(self, role: str, control: str, folder: str) -> None:
        self.role = role
        self._folder = folder
        self._shots = os.path.join(control, "shots")
        self._points = os.path.join(control, "points")
        self._kills = os.path.join(control, "kills")
        self._met: set[str] = set()

    def meet(self, phase: str, step: str, caller: str) -> None:
        """Be at a point: note it, and die there if a shot asks for it."""
        point = f"{self.role}:{phase}:{step}@{caller}"
        if point not in self._met:
            self._met.add(point)
            _append(self._points, point)
        for shot in _listdir(self._shots):
            _, wanted, times = shot.split("=")
            aimed = wanted == point or (wanted.endswith("*") and point.startswith(wanted[:-1]))
            if aimed and (times != "0" or self._is_fresh(point)):
                self._meet(shot, point, int(times))

    def _is_fresh(self, point: str) -> bool:
        """Whether it is worth dying at a point, and nobody has done so."""
        if point.partition(":")[2].startswith(NOTHING_NEW):
            return False
        try:
            with open(self._kills) as kills:
                return all(line.split(" ")[1] != point for line in kills)
        except FileNotFoundError:
            return True

    def _meet(self, shot: str, point: str, times: int) -> None:
        path = os.path.join(self._shots, shot)
        with contextlib.suppress(FileNotFoundError):  # another process has met it just now
            fd = _open(path, os.O_WRONLY | os.O_APPEND)
            _write(fd, b".")
            met = _fstat(fd).st_size
            _close(fd)
            if met >= times:
                _unlink(path)
                _append(self._kills, f"{shot} {point} {os.getpid()} {self._folder}")
                _kill(os.getpid(), signal.SIGKILL)

    def around(self, step: str, take: Callable[..., Any]) -> Callable[..., Any]:
        """Return `take` with a point before and one after it."""

        def taken(*args: Any, **kwargs: Any) -> Any:
            caller = _caller()
            if not caller:
                return take(*args, **kwargs)
            self.meet("before", step, caller)
            result = take(*args, **kwargs)
            self.meet("after", step, caller)
            return result

        return taken

    def writing(self, step: str, take: Callable[..., int]) -> Callable[..., int]:
        """Return a write of bytes, its last argument, with a point in the middle too."""

        def taken(*args: Any) -> int:
            caller = _caller()
            if not caller:
                return take(*args)
            self.meet("before", step, caller)
            done = 0
            if len(args[-1]) > 1:
                done = take(*args[:-1], args[-1][: len(args[-1]) // 2])
                self.meet("half", step, caller)
            done += take(*args[:-1], args[-1][done:])
            self.meet("after", step, caller)
            return done

        return taken


def install(role: str, control: str, folder: str = "") -> Layer:
    """Put crash points into this process, which is of `role`; return their layer."""
    layer = Layer(role, control, folder)
    for step, names in {
        "rename": ("replace", "rename"),
        "mkdir": ("mkdir",),
        "remove": ("unlink", "remove", "rmdir"),
        "link": ("symlink",),
        "cut": ("ftruncate",),
        "spawn": ("posix_spawn",),
        "fork": ("fork",),
        "exec": ("execvpe",),
    }.items():
        for name in names:
            _replace(name, layer.around(step, getattr(os, name)))
    _wrap_fsync(layer)
    os.write = layer.writing("write", os.write)
    _wrap_creation(layer)
    _wrap_unbuffered(layer)
    signal.pidfd_send_signal = layer.around("signal", signal.pidfd_send_signal)
    os.register_at_fork(after_in_child=lambda: setattr(layer, "role", "stage"))
    return layer


def install_in_daemon(role: str, control: str) -> None:
    """As `install`, with what only daemons do: transactions, and the remote."""
    layer = install(role, control)
    _wrap_transactions(layer)
    _wrap_remote(layer)
    _wrap_acknowledging(layer)


def _append(path: str, line: str) -> None:
    fd = _open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    _write(fd, f"{line}\n".encode())
    _close(fd)


def _replace(name: str, wrapped: Callable[..., Any]) -> None:
    """Put a function in the place of one of os; shutil asks os what its functions can do."""
    known = getattr(os, name)
    for able in (os.supports_dir_fd, os.supports_follow_symlinks, os.supports_fd):
        if known in able:
            able.add(wrapped)
    setattr(os, name, wrapped)


def _caller() -> str:
    """Return the innermost function of ours that is no helper, or "" when none of ours called."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        spec = frame.f_globals.get("__spec__")
        module = spec.name if spec else ""
        if module in NOT_DURABLE:
            return ""
        if module.startswith(OURS) and module not in HELPERS:
            function = f"{module}.{frame.f_code.co_qualname}"
            if function not in HELPING:
                return function.replace(".<locals>", "").replace("<lambda>", "lambda")
        frame = frame.f_back
    return ""


def _wrap_fsync(layer: Layer) -> None:
    of_file, of_folder = layer.around("fsync", os.fsync), layer.around("fsync-folder", os.fsync)

    def synced(fd: int) -> None:
        (of_folder if stat.S_ISDIR(_fstat(fd).st_mode) else of_file)(fd)

    os.fsync = synced


def _wrap_creation(layer: Layer) -> None:
    create = layer.around("create", os.open)

    def opened(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        new = flags & os.O_CREAT and flags & os.O_EXCL
        return (create if new else _open)(path, flags, *args, **kwargs)

    os.open = opened
    os.supports_dir_fd.add(opened)


def _wrap_unbuffered(layer: Layer) -> None:
    """Files opened without a buffer: each write of them is one of the system's."""
    fdopen = os.fdopen
    write, cut = layer.writing("write", io.FileIO.write), layer.around("cut", io.FileIO.truncate)

    class Unbuffered(io.FileIO):
        def write(self, data: Any) -> int:
            return write(self, bytes(data))

        def truncate(self, size: int | None = None) -> int:
            return int(cut(self, size))

    def opened(fd: int, mode: str = "r", buffering: int = -1, *args: Any, **kwargs: Any) -> Any:
        if buffering == 0:
            return Unbuffered(fd, mode.replace("b", ""))
        return fdopen(fd, mode, buffering, *args, **kwargs)

    os.fdopen = opened


def _wrap_transactions(layer: Layer) -> None:
    import sqlite3

    connect = sqlite3.connect

    class Connection(sqlite3.Connection):
        def execute(self, sql: str, *args: Any) -> sqlite3.Cursor:
            ends = sql.startswith("COMMIT") or not self.in_transaction
            caller = _caller() if ends and sql.startswith(_WRITES) else ""
            if not caller:
                return super().execute(sql, *args)
            layer.meet("before", "commit", caller)
            done = super().execute(sql, *args)
            layer.meet("after", "commit", caller)
            return done

    sqlite3.connect = lambda *args, **kwargs: connect(*args, factory=Connection, **kwargs)


def _wrap_remote(layer: Layer) -> None:
    from syncd.rclone.process import RcloneProcess
    from syncd.rclone.remote import RcloneRemote

    for step in ("delete", "delete_folder", "make_root"):
        setattr(RcloneRemote, step, layer.around(step, getattr(RcloneRemote, step)))
    RcloneProcess._spawn = layer.around("spawn", RcloneProcess._spawn)
    upload = RcloneRemote.upload

    def uploaded(remote: Any, source: Any, path: str) -> None:
        caller, step = _caller(), f"upload-{path.split('-')[3]}"
        layer.meet("before", step, caller)
        # rclone copies while we die: some of the time before it, after it, in the middle of it.
        dying = threading.Timer(time.time_ns() % 4096 / 1e6, layer.meet, ("half", step, caller))
        dying.start()
        try:
            upload(remote, source, path)
        finally:
            dying.join()
        layer.meet("after", step, caller)

    RcloneRemote.upload = uploaded


def _wrap_acknowledging(layer: Layer) -> None:
    """An acknowledgement is put into a pack; that pack's commit and upload are its sending."""
    from syncd.delivery.link import Link

    acks = Link._acks

    def acknowledged(link: Any, *, forced: bool) -> Any:
        messages = acks(link, forced=forced)
        if messages:
            layer.meet("after", "acknowledge", _caller())
        return messages

    Link._acks = acknowledged
