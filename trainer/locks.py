"""Locks between processes of one machine, as a file; they do not cross a synced folder."""

from __future__ import annotations

from pathlib import Path

from filelock import BaseFileLock, FileLock, Timeout

from protocol.errors import BusyError

LOCK_TIMEOUT_S = 30.0


def locked(path: Path, *, timeout: float = LOCK_TIMEOUT_S) -> BaseFileLock:
    """Take a lock between processes; release it, or use it as a context manager.

    Raises BusyError when another process keeps it for `timeout` seconds.
    """
    lock = FileLock(path)
    try:
        lock.acquire(timeout=timeout)
    except Timeout as error:
        raise BusyError(
            "take the lock",
            path=path,
            why="another process holds it",
            hint="Wait for it to end, or stop it.",
        ) from error
    return lock
