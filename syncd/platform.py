"""What differs between systems, behind one set of functions: processes, locks, files, mounts.

No other module of the controller's end asks which system it is on (a test sees to it), but for
`protocol/publish.py` and `protocol/files.py`, which know how files are opened and made durable.
Linux is the system that is tested; docs/platforms.md says what that means for the others.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import subprocess
import sys
import time
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from protocol.errors import BusyError, ConfigError

# psutil is imported where it is used: a supervisor is started for each attempt, and needs none.

_DEATH_SIGNAL_LAUNCHER = Path(__file__).with_name("die_with_parent.py")
_ZOMBIE_STATES = frozenset({"Z", "X", "x", "zombie", "dead"})  # of /proc, of psutil
# What ends a process whatever it does; Windows' only signal does.
KILL: int = getattr(signal, "SIGKILL", signal.SIGTERM)


def check_worker_system() -> None:
    """Raise ConfigError where no worker can run: it needs Linux's /proc and subreapers."""
    if sys.platform != "linux":
        raise ConfigError(
            "run a worker",
            why=f"a worker's end runs on Linux alone, and this is {sys.platform}",
            hint="Here only the controller's end can be: `syncd init --role controller`.",
        )


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


def own_session() -> dict[str, Any]:
    """Return what subprocess.Popen needs so that a Ctrl-C at our terminal leaves a child alone."""
    if sys.platform == "win32":
        import subprocess

        return {"creationflags": subprocess.CREATE_NEW_PROCESS_GROUP}
    return {"start_new_session": True}


def has_ended(process: subprocess.Popen[bytes]) -> bool:
    """Whether a child has ended; `wait` still has to be called.

    For a main thread that looks again and again: a KeyboardInterrupt in `Popen.poll` can leave its
    lock held, and every `wait` after that would wait for ever.
    """
    if sys.platform == "win32":
        return process.poll() is not None
    flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
    try:
        return process.returncode is not None or bool(os.waitid(os.P_PID, process.pid, flags))
    except ChildProcessError:  # it has been waited for already
        return True


def program(name: str) -> str:
    """Return the file name of a program."""
    return f"{name}.exe" if sys.platform == "win32" else name


def has_unix_sockets() -> bool:
    """Whether a socket can be a file that only its owner reaches."""
    return sys.platform != "win32"


def signal_group(process: subprocess.Popen[bytes], sig: int) -> None:
    """Send a signal to all of a process group; nothing when none of it is left.

    `process` leads it: it was started with `own_session`. On Windows `process` alone is ended.
    """
    if sys.platform == "win32":
        process.terminate()
        return
    # The kernel gives a number to no new process while a group has it. (A zombie's group: EPERM on
    # macOS.)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, sig)


@dataclass(frozen=True)
class Lock:
    """A lock that is held on the file `path`."""

    path: Path
    fd: int

    def is_lost(self) -> bool:
        """Whether another can have it too, since the file at `path` is another one, or none.

        So it is once a folder above it was moved, replaced or emptied.
        """
        try:
            return not os.path.samestat(os.stat(self.path), os.fstat(self.fd))
        except (FileNotFoundError, NotADirectoryError):
            return True
        except OSError:
            return False  # nothing is known: a mount that is away for a while, say


@contextlib.contextmanager
def exclusive_lock(path: Path, what: str, *, patience: float = 0.0) -> Iterator[Lock]:
    """Hold a lock on the file `path`, made when missing, until the block, or the process, ends.

    Such locks do not cross a network or a synced folder. Raises BusyError, saying that `what` was
    being done, when another process, or another holder in this one, has the lock for `patience`
    seconds more; the holder's process id stands in the file, for people. A daemon that was killed
    while it started a program has the lock until that program has begun.
    """
    deadline = time.monotonic() + patience
    fd = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o600)
    try:
        while not _lock(fd):
            if time.monotonic() >= deadline:
                why = f"{_holder(fd)} holds the lock"
                raise BusyError(what, path=path, why=why, hint="Stop that one first.")
            time.sleep(0.05)
        with contextlib.suppress(OSError):  # a full disk
            os.ftruncate(fd, 0)
            os.write(fd, b"%d\n" % os.getpid())
        yield Lock(path, fd)
    finally:
        os.close(fd)


def is_locked(path: Path) -> bool | None:
    """Whether somebody holds `exclusive_lock` on a file; None where the system does not tell.

    It is the kernel's list of locks that is read: to try the lock could turn another away.
    """
    try:
        held = Path("/proc/locks").read_text("ascii", "replace")
    except OSError:
        return None
    try:
        inode = path.stat().st_ino
    except FileNotFoundError:
        return False
    # 1: FLOCK  ADVISORY  WRITE 1234 fe:00:2385223 0 EOF
    return any(
        fields[1] == "FLOCK" and fields[5].endswith(f":{inode}")
        for fields in map(str.split, held.splitlines())
        if len(fields) > 5
    )


def has_modes() -> bool:
    """Whether files have owners, and permissions for others, that chmod sets."""
    return sys.platform != "win32"


def is_ours(found: os.stat_result) -> bool:
    """Whether a file belongs to this user; taken for granted where files have no owners."""
    if sys.platform == "win32":
        return True
    return found.st_uid == os.getuid()


def set_mode(fd: int, mode: int) -> None:
    """Set an open file's permissions; nothing on Windows, where all that is written has one."""
    if sys.platform != "win32":
        os.fchmod(fd, mode)


def change_time_ns(found: os.stat_result) -> int:
    """Return when a file's content or mode last changed, by a time that no program sets.

    On Windows, where st_ctime is when it was made, the modification time.
    """
    return found.st_mtime_ns if sys.platform == "win32" else found.st_ctime_ns


def sync_disks() -> None:
    """Make all that was written durable; nothing on Windows, which has no such call."""
    if sys.platform != "win32":
        os.sync()


def starts_with_drive(path: str) -> bool:
    """Whether a path begins with a drive's letter, which rclone would take for a remote's name."""
    return sys.platform == "win32" and path[:1].isalpha() and path[1:2] == ":"


def portable_name(name: str) -> str:
    """Return a file's name as it is to be on other systems.

    macOS finds a file by either Unicode form of its name, and may hand out the decomposed one;
    Linux tells the two apart, and what people type there is composed (NFC).
    """
    return unicodedata.normalize("NFC", name) if sys.platform == "darwin" else name


def folded_onto(path: Path) -> str | None:
    """Return the name of another file that this disk takes `path` for, None when there is none.

    Windows and macOS do not tell names apart by case.
    """
    if not os.path.lexists(path):
        return None
    wanted = unicodedata.normalize("NFC", path.name)
    there = [unicodedata.normalize("NFC", name) for name in os.listdir(path.parent)]
    if wanted in there:
        return None
    return next((name for name in there if name.casefold() == wanted.casefold()), None)


def free_inodes(path: Path) -> int | None:
    """Return how many more files a disk can take; None where there is no such limit."""
    if sys.platform == "win32":
        return None
    found = os.statvfs(path)
    return found.f_favail if found.f_files else None


def takes_long_paths() -> bool:
    """Whether paths of more than 260 characters can be opened. On Windows a setting says so."""
    if sys.platform == "win32":
        import winreg

        where = r"SYSTEM\CurrentControlSet\Control\FileSystem"
        try:
            with winreg.OpenKey(winreg.HKEY_LOCAL_MACHINE, where) as key:
                return bool(winreg.QueryValueEx(key, "LongPathsEnabled")[0])
        except OSError:
            return False
    return True


def memory_limit() -> int | None:
    """Return the bytes that this process's control group may have; None for no limit, or none."""
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):
            limit = int(Path("/sys/fs/cgroup", name).read_text("ascii"))
            return limit if limit < 2**60 else None  # v1 says nearly 2^63 for "none"
    return None


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


def _lock(fd: int) -> bool:
    """Take the lock; return whether nobody else has it."""
    try:
        if sys.platform == "win32":
            import msvcrt

            msvcrt.locking(fd, msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EAGAIN, errno.EACCES, errno.EDEADLK):
            raise
        return False
    return True


def _sysctl_text(name: str) -> str:
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    size = ctypes.c_size_t(256)
    buffer = ctypes.create_string_buffer(size.value)
    if libc.sysctlbyname(name.encode(), buffer, ctypes.byref(size), None, 0) != 0:
        raise OSError(ctypes.get_errno(), f"sysctl {name}")
    return buffer.value.decode("ascii")
