"""What differs between systems, behind one set of functions: process identity, locks, mounts.

Linux is the system that is tested. Elsewhere each function says what it falls back to.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from protocol.errors import BusyError

# psutil is imported where it is used: a supervisor is started for each attempt, and needs none.

_DEATH_SIGNAL_LAUNCHER = Path(__file__).with_name("die_with_parent.py")
_ZOMBIE_STATES = frozenset({"Z", "X", "x", "zombie", "dead"})  # of /proc, of psutil


@cache
def boot_id() -> str:
    """Return what names this boot of the machine; it does not change with the clock.

    `""` where the system has no such name (Windows): start times are absolute there, so two
    boots are told apart by them.
    """
    name = ""
    if sys.platform == "linux":
        name = Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
    elif sys.platform == "darwin":
        name = _sysctl_text("kern.bootsessionuuid")
    return name


def process_start(pid: int) -> str | None:
    """Return when a process started, as an opaque word, or None when there is no such process.

    Linux: clock ticks since boot, field 22 of /proc/PID/stat (proc_pid_stat(5)), which a change of
    the clock leaves alone. Elsewhere: the creation time that the system recorded.
    A zombie still has a start.
    """
    found = _state_and_start(pid)
    return found[1] if found else None


@dataclass(frozen=True)
class Identity:
    """One process, told apart from every other that has had, or will have, its process id."""

    pid: int
    start: str
    boot: str

    @classmethod
    def of(cls, pid: int) -> Identity | None:
        """Return the identity of the process that has `pid` now, or None when there is none."""
        start = process_start(pid)
        return None if start is None else cls(pid, start, boot_id())

    def alive(self) -> bool:
        """Whether this very process still runs. A zombie does not."""
        if self.boot != boot_id():
            return False
        found = _state_and_start(self.pid)
        return found is not None and found[1] == self.start and found[0] not in _ZOMBIE_STATES

    def signal(self, sig: int) -> bool:
        """Send a signal to this very process; return whether there was such a process alive.

        Never reaches another one: the process is held by a pidfd while its identity is checked.
        Where there are no pidfds, a process that ends between check and signal leaves a gap of
        microseconds. Raises PermissionError when the process is another user's.
        """
        pidfd = _open_pidfd(self.pid)
        try:
            if not self.alive():
                return False
            _send(self.pid, pidfd, sig)
        except ProcessLookupError:
            return False
        finally:
            if pidfd is not None:
                os.close(pidfd)
        return True


def die_with_parent(argv: Sequence[str]) -> list[str]:
    """Return a command line that runs `argv` so that the kernel kills it when its parent dies.

    The process id stays the same. On Linux "parent" is the *thread* that starts it: start it from
    a thread that lives as long as the process should. Elsewhere `argv` comes back as it is, and
    the process can outlive its parent.
    """
    launcher: list[str] = []
    if sys.platform == "linux":
        # -I: this folder must not come onto sys.path, where our modules would shadow the standard
        # ones. -S: the launcher needs no packages.
        launcher = [sys.executable, "-I", "-S", str(_DEATH_SIGNAL_LAUNCHER), str(os.getpid())]
    return [*launcher, *argv]


@contextlib.contextmanager
def exclusive_lock(path: Path, what: str) -> Iterator[None]:
    """Hold a lock on the file `path`, made when missing, until the block, or the process, ends.

    Such locks do not cross a network or a synced folder. Raises BusyError, saying that `what` was
    being done, when another process, or another holder in this one, has the lock; the holder's
    process id stands in the file, for people.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o600)
    try:
        try:
            _lock(fd)
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EACCES, errno.EDEADLK):
                raise
            why = f"{_holder(fd)} holds the lock"
            raise BusyError(what, path=path, why=why, hint="Stop that one first.") from error
        with contextlib.suppress(OSError):  # a full disk
            os.ftruncate(fd, 0)
            os.write(fd, b"%d\n" % os.getpid())
        yield
    finally:
        os.close(fd)


def filesystem_type(path: Path) -> str:
    """Return the type of the file system that holds `path` ("ext4", "fuse.rclone"), or ""."""
    import psutil

    at = os.path.realpath(path)
    best, kind = "", ""
    # all=True: network and FUSE mounts are not "physical devices". The last mount on a point wins.
    for mount in psutil.disk_partitions(all=True):
        inside = at == mount.mountpoint or at.startswith(os.path.join(mount.mountpoint, ""))
        if inside and len(mount.mountpoint) >= len(best):
            best, kind = mount.mountpoint, mount.fstype
    return kind


def _state_and_start(pid: int) -> tuple[str, str] | None:
    """Return a process's state (a letter or psutil's word) and its start, or None."""
    if sys.platform != "linux":
        import psutil

        try:
            process = psutil.Process(pid)
            return process.status(), repr(process.create_time())
        except psutil.NoSuchProcess:
            return None
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The second field, the name in brackets, may hold blanks and brackets itself.
    fields = stat[stat.rindex(b")") + 1 :].split()
    return fields[0].decode("ascii"), fields[19].decode("ascii")


def _open_pidfd(pid: int) -> int | None:
    """Return a pidfd, or None where there are none, or the process is gone."""
    if not hasattr(os, "pidfd_open"):
        return None
    try:
        pidfd: int = os.pidfd_open(pid)
    except OSError:
        # No such process, a kernel before 5.3, or a sandbox: the caller's check of the identity
        # tells the first from the others.
        return None
    return pidfd


def _send(pid: int, pidfd: int | None, sig: int) -> None:
    if sys.platform == "linux" and pidfd is not None:
        signal.pidfd_send_signal(pidfd, sig)
    else:
        os.kill(pid, sig)


def _holder(fd: int) -> str:
    """Return who holds a lock by the word of its file: a hint, since a child may hold it, too."""
    pid = b""
    with contextlib.suppress(OSError):  # Windows keeps the bytes that are locked to their holder
        pid = os.read(fd, 32).strip()
    return f"process {pid.decode()}" if pid.isdigit() else "another process"


def _lock(fd: int) -> None:
    if sys.platform == "win32":
        import msvcrt

        msvcrt.locking(fd, msvcrt.LK_NBLCK, 1)
    else:
        import fcntl

        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _sysctl_text(name: str) -> str:
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    size = ctypes.c_size_t(256)
    buffer = ctypes.create_string_buffer(size.value)
    if libc.sysctlbyname(name.encode(), buffer, ctypes.byref(size), None, 0) != 0:
        raise OSError(ctypes.get_errno(), f"sysctl {name}")
    return buffer.value.decode("ascii")
