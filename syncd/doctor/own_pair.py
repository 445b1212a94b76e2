"""The scene on a person's own set-up: this controller's daemon, and a worker somewhere else."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator

from protocol.errors import BusyError, UsageError
from protocol.paths import Layout
from protocol.status import duration, gone_after
from protocol.wire import Role
from syncd.config import load_settings
from syncd.doctor.scene import DrillError, Scene
from syncd.platform import exclusive_lock
from syncd.view import is_watched, read_age, read_role, read_status
from syncd.watching import Watch

HEARD_SECONDS = 45.0  # a worker sends a heartbeat every 20 s
CATCH_UP_SECONDS = 15.0
OUTPUT, LOCK = "drill.log", "drill.lock"
DRILL = "syncd doctor --drill"


@contextlib.contextmanager
def own_pair(layout: Layout, *, tell: Callable[[str], None] = lambda what: None) -> Iterator[Scene]:
    """Start `syncd watch` for this folder, with this environment, and end it again.

    Raises BusyError when one runs that the drills have not started, and so must not kill;
    UsageError at a worker's end.
    """
    if (read_role(layout) or load_settings(layout, {}).role) is Role.WORKER:
        raise UsageError(
            DRILL,
            path=layout.root,
            why="this end is the worker's, and commands are appended at the controller's",
            hint="Run it there; `syncd doctor --drill --local` has both ends on one machine.",
        )
    # Of two at once each would find the other's daemon in its way, whenever its own was killed.
    with exclusive_lock(layout.private / LOCK, DRILL):
        if is_watched(layout):
            raise BusyError(
                DRILL,
                path=layout.root,
                why="a `syncd watch` runs there, and the drills kill one of their own",
                hint="Stop it, and start it again afterwards.",
            )
        with _watched(layout, tell) as scene:
            yield scene


@contextlib.contextmanager
def _watched(layout: Layout, tell: Callable[[str], None]) -> Iterator[Scene]:
    environ = {**os.environ, "SYNCD_ROLE": Role.CONTROLLER}
    watch = Watch(layout, layout.private / OUTPUT, environ=environ)
    scene = Scene(watch, tell=tell)
    watch.start()
    try:
        scene.silent = _why_silent(scene)
        yield scene
    finally:
        watch.stop()


def _why_silent(scene: Scene) -> str:
    """Wait for a heartbeat; return why the worker cannot be counted on, "" when it can.

    What comes first may be an old one that lay on the remote: it must be of late by the worker's
    own clock, or be followed by another one. A worker at rest may have nothing new to say, and
    then one that was here before does, once there was time for what is newer to come.
    """
    began, dated = time.time(), set[float]()

    def heard() -> bool:
        status, age = read_status(scene.layout), read_age(scene.layout)
        if status is None or age is None or status.leaving:
            return False
        now, came = time.time(), time.time() - age
        if came > began:
            dated.add(status.time)
        elif now - began < CATCH_UP_SECONDS or age > gone_after(status):
            return False
        return len(dated) > 1 or abs(now - status.time) < gone_after(status)

    try:
        scene.until(heard, "the worker's heartbeat", seconds=HEARD_SECONDS)
    except DrillError:
        scene.check()
        age = read_age(scene.layout)
        last = f"last heard {duration(age)} ago" if age is not None else "never heard of"
        return f"it needs the worker, which is off: {last}"
    return ""
