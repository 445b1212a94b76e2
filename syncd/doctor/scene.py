"""What a drill acts on: the ends that it may injure, and the proof that no work was lost.

The proof is a command that prints numbered lines. It must be claimed, started and ended once each,
by the journal, and every line must stand in its log once, in order, between header and trailer.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from protocol.errors import RunFailedError, UserError
from protocol.journal import JournalRecord
from protocol.logs import LogEnd, LogStart, parse_log_line
from protocol.paths import Layout
from protocol.queue import encode_script
from protocol.states import Result, State
from syncd.platform import Identity
from syncd.view import CommandView, append_commands, is_watched, read_commands, read_records
from syncd.watching import Watch

T = TypeVar("T")

PATIENCE = 180.0
LOOK_SECONDS = 0.1
TELL_SECONDS = 2.0  # for what takes less, nobody asks
LINES = 20
PAUSE_SECONDS = 0.2


class DrillError(Exception):
    """What must hold does not."""


class SkippedError(Exception):
    """The drill cannot be done here."""


@dataclass
class Scene:
    """A pair of ends as far as it can be reached from here.

    `watch` is the controller's daemon, started by us. `silent` says why the worker cannot be
    counted on, "" when it can; `tell` shows what is being done, in the drill `now`; `appended` are
    the lines that were added to the queue. The rest is there in a scratch pair alone: the worker's
    daemon, how to cut and mend its connection, and how to take its machine away and start another
    one.
    """

    watch: Watch
    silent: str = ""
    tell: Callable[[str], None] = lambda what: None
    now: str = ""
    appended: list[str] = field(default_factory=list)
    worker: Watch | None = None
    cut: Callable[[], None] | None = None
    mend: Callable[[], None] | None = None
    lose: Callable[[], None] | None = None
    replace: Callable[[], None] | None = None

    @property
    def layout(self) -> Layout:
        return self.watch.layout

    def until(self, found: Callable[[], T | None], what: str, *, seconds: float = PATIENCE) -> T:
        """Wait for `what`: return what `found` returns once it is true.

        Raises DrillError after a while.
        """
        began, told = time.monotonic(), False
        deadline = began + seconds
        while True:
            with suppress(UserError):  # a file that is being made
                if value := found():
                    return value
            self.check()
            if time.monotonic() > deadline:
                raise DrillError(f"waited {seconds:.0f} s for {what}")
            if not told and time.monotonic() > began + TELL_SECONDS:
                self.say(f"waiting for {what}, {seconds:.0f} s at most")
                told = True
            time.sleep(LOOK_SECONDS)

    def say(self, what: str) -> None:
        """Show what is being done."""
        self.tell(f"{self.now}: {what}" if self.now else what)

    def check(self) -> None:
        """Raise DrillError when a daemon has ended by itself."""
        for watch in (self.watch, self.worker):
            try:
                if watch is not None:
                    watch.check()
            except RunFailedError as error:
                raise DrillError(str(error)) from error

    def restart(self, *watches: Watch) -> None:
        """Kill daemons, all before the first is started again."""
        for watch in watches:
            watch.kill()
        for watch in watches:
            watch.start()
        for watch in watches:
            self.until(lambda w=watch: is_watched(w.layout) is not False, _BACK)  # type: ignore[misc]

    def append(self, *lines: str) -> None:
        """Append lines to the queue, as a person would."""
        append_commands(self.layout, lines)
        self.appended += lines

    def became(self) -> dict[str, CommandView | None]:
        """What became of each line that was appended; None where the daemon has not taken it up."""
        views = {view.line: view for view in read_commands(self.layout)}
        return {line: views.get(line) for line in self.appended}

    def records(self, line: str) -> list[JournalRecord]:
        """The journal's records of a line, as the controller has them."""
        return [record for record in read_records(self.layout) if record.line == line]

    def ended(self, line: str) -> JournalRecord:
        """Wait until a line's command has ended; return its last record."""

        def find() -> JournalRecord | None:
            found = [record for record in self.records(line) if record.state is State.ENDED]
            return found[-1] if found else None

        return self.until(find, "the command's end")


_BACK = "the daemon to come back"


@dataclass
class Proof:
    """A harmless command that proves by what it prints that it was run once, and wholly heard."""

    nonce: str = field(default_factory=lambda: os.urandom(8).hex())
    lines: int = LINES
    pause: float = PAUSE_SECONDS

    @property
    def line(self) -> str:
        """The queue's line."""
        return encode_script(
            f"i=0; while [ $i -lt {self.lines} ]; do i=$((i+1)); "
            f"echo {self.nonce} $i; sleep {self.pause:g}; done"
        )

    def append(self, scene: Scene) -> None:
        """Append it to the queue."""
        scene.append(self.line)

    def started(self, scene: Scene) -> None:
        """Wait until it runs."""
        states = (State.STARTED, State.ENDED)
        scene.until(
            lambda: any(record.state in states for record in scene.records(self.line)),
            "the command's start",
        )

    def verify(self, scene: Scene) -> None:
        """Wait for its end. Raises DrillError unless it ran once and all that it said is here."""
        last = scene.ended(self.line)
        if last.result is not Result.SUCCESS:
            raise DrillError(f"the command ended as {last.result}: {last.cause}")
        states = [record.state for record in scene.records(self.line)]
        if states != [State.CLAIMED, State.STARTED, State.ENDED]:
            raise DrillError(f"the journal has it as {', '.join(states)}: not once each")
        check_log(scene.layout.shell_log(last.number), self.nonce, self.lines)


def check_log(path: Path, nonce: str, count: int) -> None:
    """Raise DrillError unless a log has each line once, in order, between header and trailer."""
    lines = path.read_bytes().splitlines() if path.exists() else []
    kinds = [parse_log_line(line) for line in lines]
    if not lines or not isinstance(kinds[0], LogStart) or not isinstance(kinds[-1], LogEnd):
        raise DrillError(f"{path.name} has no header, or no trailer")
    said = [line for line, kind in zip(lines, kinds, strict=True) if kind is None]
    wanted = [f"{nonce} {n}".encode() for n in range(1, count + 1)]
    if said != wanted:
        raise DrillError(f"{path.name} has {len(said)} lines of {count}, or others than were said")


def children(layout: Layout) -> Iterator[tuple[str, Identity]]:
    """Yield what the daemon and a bridge of this folder have started: name, and which process."""
    for path in sorted(
        [*layout.private.glob("rclone/*.pid"), *layout.private.glob("bridge/*.pid")]
    ):
        with suppress(OSError, ValueError, TypeError, LookupError):
            pid, start, boot, *_ = json.loads(path.read_bytes())
            identity = Identity(int(pid), str(start), str(boot))
            if identity.alive():
                yield f"{path.parent.name}/{path.stem}", identity


def child(layout: Layout, name: str) -> Identity | None:
    """Return the process of this name that is alive, if there is one."""
    return dict(children(layout)).get(name)
