"""The drills: each injures something, and raises DrillError unless what must hold does.

A drill is a function of a scene. It leaves everything as it was, also when it fails.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

from protocol.logs import LogEnd, parse_log_line
from protocol.states import Result, State
from syncd.doctor.bridge import why_not_cut
from syncd.doctor.scene import DrillError, Proof, Scene, SkippedError, child, children
from syncd.platform import KILL, Identity

RCLONE = "rclone/rclone"
STALL_SECONDS = 10.0
CUT_SECONDS = 5.0
STAGE = "drill"


@dataclass(frozen=True)
class Drill:
    """One drill: what is done, and what must hold; `run` may return what else is to be said."""

    name: str
    must: str
    run: Callable[[Scene], str | None]


def there_and_back(scene: Scene) -> None:
    _needs_worker(scene)
    proof = Proof(lines=3, pause=0)
    proof.append(scene)
    try:
        proof.verify(scene)
    except DrillError:
        scene.silent = "it needs the worker, and that did not run a command before"
        raise


def daemon_is_killed(scene: Scene) -> str | None:
    if scene.silent:
        scene.restart(scene.watch)
        _rclone(scene)
        return _CAME_BACK
    proof = Proof()
    proof.append(scene)
    scene.restart(scene.watch)  # at once: the line may be numbered by then, or not
    proof.started(scene)
    scene.restart(scene.watch)
    proof.verify(scene)
    return None


def line_is_appended_while_it_is_dead(scene: Scene) -> None:
    _needs_worker(scene)
    proof = Proof(lines=3, pause=0)
    scene.watch.kill()
    try:
        proof.append(scene)
    finally:
        scene.watch.start()
    proof.verify(scene)


def rclone_is_killed(scene: Scene) -> str | None:
    proof = Proof()
    if not scene.silent:
        proof.append(scene)
        proof.started(scene)
    for _ in range(3):
        before = _rclone(scene)
        before.signal(KILL)
        _rclone(scene, other_than=before)
    if scene.silent:
        return _CAME_BACK
    proof.verify(scene)
    return None


def rclone_stands_still(scene: Scene) -> None:
    _needs_worker(scene)
    if not hasattr(signal, "SIGSTOP"):
        raise SkippedError("this system cannot stop a process for a while")
    proof = Proof(pause=0.1)
    stopped = _rclone(scene)
    stopped.signal(signal.SIGSTOP)
    try:
        proof.append(scene)
        scene.say(f"rclone stands still for {STALL_SECONDS:.0f} s")
        time.sleep(STALL_SECONDS)
    finally:
        stopped.signal(signal.SIGCONT)
    proof.verify(scene)


def bridge_is_cut(scene: Scene) -> str | None:
    before = {name: p for name, p in children(scene.layout) if name.startswith("bridge/")}
    if not before:
        raise SkippedError("no `syncd bridge` runs for this folder")
    if why := why_not_cut(scene.layout):
        raise SkippedError(why)
    proof = Proof()
    if not scene.silent:
        proof.append(scene)
        proof.started(scene)
    for process in before.values():
        process.signal(KILL)
    for name, killed in before.items():
        scene.until(
            lambda name=name, killed=killed: child(scene.layout, name) not in (None, killed),  # type: ignore[misc]
            f"{name} to come back",
        )
    if scene.silent:
        return _CAME_BACK
    proof.verify(scene)
    return None


def both_daemons_are_killed(scene: Scene) -> None:
    worker = scene.worker
    if worker is None:
        raise SkippedError(_OTHER_END)
    proof = Proof()
    proof.append(scene)
    proof.started(scene)
    for _ in range(2):
        scene.restart(scene.watch, worker)
    proof.verify(scene)


def remote_is_cut(scene: Scene) -> None:
    if scene.cut is None or scene.mend is None:
        raise SkippedError(_OTHER_END)
    proof = Proof()
    proof.append(scene)
    proof.started(scene)
    scene.cut()
    try:
        time.sleep(CUT_SECONDS)
    finally:
        scene.mend()
    proof.verify(scene)


def machine_is_lost(scene: Scene) -> None:
    """A `run:` goes on at the next machine, in a second attempt; an `sh:` ends as lost."""
    if scene.lose is None or scene.replace is None:
        raise SkippedError(_OTHER_END)
    shell = Proof(lines=10_000, pause=1)
    run = f"run:{STAGE}"
    scene.append(run, shell.line)
    shell.started(scene)
    scene.until(
        lambda: any(record.state is State.STARTED for record in scene.records(run)),
        "the stage's start",
    )
    scene.lose()
    scene.replace()
    lost, done = scene.ended(shell.line), scene.ended(run)
    if lost.result is not Result.LOST:
        raise DrillError(f"the sh: ended as {lost.result}, and must not be run twice")
    if (done.result, done.attempt) != (Result.SUCCESS, 2):
        raise DrillError(f"the run: ended as {done.result}, attempt {done.attempt}: {done.cause}")
    last = scene.layout.log(STAGE).read_bytes().splitlines()[-1]
    if not isinstance(parse_log_line(last), LogEnd):
        raise DrillError(f"{STAGE}.log is not whole")


_CAME_BACK = "it came back; whether a command was run once takes the worker, which is off"
_OTHER_END = "it takes the other end; --local has both here"


def _needs_worker(scene: Scene) -> None:
    if scene.silent:
        raise SkippedError(scene.silent)


def _rclone(scene: Scene, *, other_than: Identity | None = None) -> Identity:
    """Wait for the daemon's rclone, which is not the one that was killed."""

    def find() -> Identity | None:
        found = child(scene.layout, RCLONE)
        return None if found == other_than else found

    return scene.until(find, "rclone to come back")


DRILLS = (
    Drill("there and back", "a command is run, and its log comes back", there_and_back),
    Drill(
        "daemon killed",
        "`syncd watch` here is killed twice: the command is run once, its log arrives whole",
        daemon_is_killed,
    ),
    Drill(
        "appended while dead",
        "a line appended while no daemon runs is run once",
        line_is_appended_while_it_is_dead,
    ),
    Drill(
        "rclone killed",
        "rclone is killed three times and comes back: run once, the log whole",
        rclone_is_killed,
    ),
    Drill(
        "rclone stalled",
        f"rclone stands still for {STALL_SECONDS:.0f} s: run once, the log whole",
        rclone_stands_still,
    ),
    Drill(
        "bridge cut",
        "the bridge's server and tunnel are killed and come back: run once, the log whole",
        bridge_is_cut,
    ),
    Drill(
        "both daemons killed",
        "both ends' daemons are killed twice: run once, the log whole",
        both_daemons_are_killed,
    ),
    Drill(
        "remote cut",
        f"the worker's connection is cut for {CUT_SECONDS:.0f} s: run once, the log whole",
        remote_is_cut,
    ),
    Drill(
        "machine lost",
        "the worker and its disk are gone: the run: goes on at the next one, the sh: is lost",
        machine_is_lost,
    ),
)
