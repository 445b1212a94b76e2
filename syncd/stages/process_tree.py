"""Processes as trees: who descends from whom, and ending all of them. Linux only (/proc)."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from protocol.errors import BusyError
from syncd.platform import Identity

# How long a process may take to die of SIGKILL before it is reported: one in an uninterruptible
# call (a dead network or FUSE mount, a GPU driver) does not.
KILL_PATIENCE = 10.0


def with_variable(name: bytes) -> Iterator[tuple[Identity, bytes]]:
    """Yield the living processes that have a variable in their environment, each with its value."""
    for pid in _process_ids():
        # The identity first: should the process id change hands after it, it is of a dead process.
        process = Identity.of(pid)
        with contextlib.suppress(OSError):  # gone, or another user's
            environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            found = next((v for v in environ if v.startswith(name + b"=")), None)
            if found is not None and process is not None and process.alive():
                yield process, found[len(name) + 1 :]


def descendants(roots: Iterable[Identity]) -> list[Identity]:
    """Return the living descendants of `roots`, those in sessions of their own included.

    One that is started meanwhile may be missed: ask until none is left.
    """
    children: dict[int, list[int]] = {}
    for pid in _process_ids():
        children.setdefault(_parent(pid), []).append(pid)
    found: list[Identity] = []
    frontier = list(roots)
    while frontier:
        parent = frontier.pop()
        for pid in children.get(parent.pid, ()):
            child = Identity.of(pid)
            # In this order, so that no change of hands of either process id goes unnoticed.
            if child and child.alive() and _parent(pid) == parent.pid and parent.alive():
                found.append(child)
                frontier.append(child)
    return found


def end_processes(
    find: Callable[[], Sequence[Identity] | None], grace: float, pause: Callable[[float], object]
) -> bool:
    """End all that `find` finds, until it returns None: SIGTERM, after `grace` seconds SIGKILL.

    Each process is asked once with each signal, those that appear meanwhile too. `pause` waits
    for up to so many seconds. Returns whether a SIGKILL was needed.

    Raises BusyError when some survive SIGKILL for 10 s, as in a call that cannot be interrupted.
    """
    left: Sequence[Identity] | None = ()
    for sig, patience in ((signal.SIGTERM, grace), (signal.SIGKILL, KILL_PATIENCE)):
        deadline, step = time.monotonic() + patience, 0.01
        asked: set[Identity] = set()
        while (left := find()) is not None:
            for process in left:
                if process not in asked:
                    _send(process, sig)
            asked.update(left)
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                break
            pause(min(step, remaining))
            step = min(step * 2, 0.5)
        else:
            return sig is signal.SIGKILL and bool(asked)
    pids = ", ".join(str(process.pid) for process in left or ())
    raise BusyError("end a stage's processes", why=f"alive after SIGKILL: {pids or 'unknown'}")


def end_all(
    find: Callable[[], Sequence[Identity] | None],
    grace: float,
    pause: Callable[[float], object],
    tell: Callable[[str], object],
) -> bool:
    """Do as `end_processes`, however long it takes; `tell` is told of what survives SIGKILL."""
    while True:
        try:
            return end_processes(find, grace, pause)
        except BusyError as error:
            tell(str(error))
            grace = 0.0


def _send(process: Identity, sig: signal.Signals) -> None:
    with contextlib.suppress(PermissionError):  # another user's; it is named if it stays
        process.signal(sig)
        if sig is signal.SIGTERM:
            process.signal(signal.SIGCONT)  # a suspended process acts on SIGTERM only when woken


def _process_ids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdecimal()]


def _parent(pid: int) -> int:
    """Return the process id of the parent (proc_pid_stat(5), field 4), 0 when there is none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return 0
    return int(stat[stat.rindex(b")") + 1 :].split()[1])
