"""Run our code as if this were another system: what it lacks is taken away, what it has is faked.

    python tests/support/other_systems.py win32 import
    python tests/support/other_systems.py darwin syncd watch -C FOLDER

Fakes prove that nothing is used that the system has not, and that what is used there is what we
think. They cannot prove what the system itself does.
"""

from __future__ import annotations

import ast
import errno
import importlib
import os
import signal
import socket
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
# What belongs to a worker, which is Linux's alone, and what only ever runs on Linux.
WORKER = (
    *("syncd.stages.", "syncd.worker", "syncd.die_with_parent", "syncd.doctor.scratch_pair"),
    *("syncd.notebook.pasted", "syncd.notebook.start", "syncd.notebook.keeper", "syncd.gpu_meter"),
    "syncd.bench.",  # it measures with both ends on one machine
)
SCHEDULE = ("syncd.stages.schedule",)

_LINUX = (
    (os, ("pidfd_open", "sched_getaffinity", "posix_fadvise", "O_TMPFILE", "eventfd")),
    (signal, ("pidfd_send_signal", "sigtimedwait", "sigwaitinfo", "SIGRTMIN", "SIGRTMAX")),
)
_POSIX = (
    (
        os,
        (
            *("fork", "setsid", "getuid", "geteuid", "getgid", "getegid", "killpg", "getpgid"),
            # Not statvfs: shutil.disk_usage has another way there, and none here.
            *("fchmod", "chown", "mkfifo", "posix_spawn", "sync", "wait", "setuid"),
            *("O_NONBLOCK", "O_NOFOLLOW", "O_DIRECTORY", "O_CLOEXEC", "SEEK_DATA", "SEEK_HOLE"),
            *("uname", "getloadavg"),
        ),
    ),
    (
        signal,
        (
            *("SIGKILL", "SIGSTOP", "SIGCONT", "SIGHUP", "SIGQUIT", "SIGCHLD", "SIGPIPE"),
            *("pthread_sigmask", "valid_signals", "setitimer", "alarm", "SIGUSR1", "SIGXFSZ"),
        ),
    ),
    (socket, ("AF_UNIX", "socketpair")),
)
_POSIX_MODULES = ("fcntl", "pwd", "grp", "resource", "termios", "pty", "tty", "syslog")


def ours() -> list[str]:
    """The modules that must work at a controller's end on every system."""
    names = []
    for package in ("protocol", "syncd"):
        for path in sorted((ROOT / package).rglob("*.py")):
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            name = name.removesuffix(".__init__")
            if name in SCHEDULE or not (name.startswith(WORKER) or name.endswith("__main__")):
                names.append(name)
    return names


def _foreign(names: list[str]) -> Iterator[str]:
    """The modules of others that ours import at their top."""
    for name in names:
        path = ROOT.joinpath(*name.split("."))
        source = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        for node in ast.walk(ast.parse(source.read_text("utf-8"))):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module:
                yield node.module


def pretend(system: str) -> None:
    """Make this process believe that it runs on `system`: "win32" or "darwin"."""
    for name in set(_foreign(ours())):
        if name.partition(".")[0] not in ("protocol", "syncd", *_ONLY_THERE):
            importlib.import_module(name)
    import fcntl

    real_flock = fcntl.flock
    if system == "win32":
        sys.modules["msvcrt"] = _msvcrt(real_flock)
        sys.modules["winreg"] = _winreg()
        subprocess.Popen.kill = subprocess.Popen.terminate  # type: ignore[method-assign]
        subprocess.CREATE_NEW_PROCESS_GROUP = 0  # type: ignore[attr-defined]
        for name in _POSIX_MODULES:
            sys.modules[name] = None  # type: ignore[assignment]
    for module, names in [*_LINUX, *(_POSIX if system == "win32" else ())]:
        for name in names:
            if hasattr(module, name):
                delattr(module, name)
    sys.platform = system
    if system == "win32":
        from syncd.rclone import binary

        binary._NAME = "rclone"  # the one that runs here
    if system == "darwin":
        from syncd import platform

        platform._sysctl_text = lambda name: f"{name} of a fake"  # type: ignore[assignment]


_ONLY_THERE = ("msvcrt", "winreg")


def _msvcrt(flock) -> types.ModuleType:
    """A lock of one byte that keeps others out, as Windows' C library has."""
    module = types.ModuleType("msvcrt")

    def locking(fd: int, mode: int, count: int) -> None:
        assert (mode, count) == (2, 1)
        try:
            flock(fd, 2 | 4)  # LOCK_EX, LOCK_NB
        except OSError as error:
            raise OSError(errno.EACCES, "Permission denied") from error

    module.locking, module.LK_NBLCK = locking, 2  # type: ignore[attr-defined]
    return module


def _winreg() -> types.ModuleType:
    """A registry that allows no long paths."""
    module = types.ModuleType("winreg")

    def refuse(*arguments: object) -> None:
        raise FileNotFoundError(errno.ENOENT, "no such key")

    module.HKEY_LOCAL_MACHINE, module.OpenKey = 0, refuse  # type: ignore[attr-defined]
    return module


def main() -> int:
    system, what, *arguments = sys.argv[1:]
    pretend(system)
    if what == "import":
        for name in ours():
            importlib.import_module(name)
            print(name)
        return 0
    return importlib.import_module("syncd.cli").main(arguments)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main())
