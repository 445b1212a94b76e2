"""Keeps a worker running on this machine, and tells the notebook's cell how it is.

`start.py` runs it (`python -m syncd.notebook`) with a request on standard input and shows its
frames, each a line of JSON. It ends with the cell. The worker does not: it has a session of its
own, which neither an interrupt of the cell nor the end of the kernel reaches, and the next cell's
keeper finds it again.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from protocol.errors import DataError, ExitCode, RunFailedError, UserError
from protocol.paths import Layout
from protocol.schema import decode, dumps, loads
from protocol.status import Status, duration, render_status
from syncd.holder import VARIABLE, Holder, read_holder
from syncd.leaving import Left, Reason, read_left
from syncd.notebook.endings import Endings, last_error, told_code
from syncd.notebook.folder import Request, prepare, rclone_config
from syncd.notebook.html import render_html
from syncd.notebook.pulse import Pulse
from syncd.platform import Identity, has_ended, is_locked, own_session
from syncd.view import read_status

LOOK_SECONDS = 1.0
FRAME_SECONDS = 10.0
END_SECONDS = 60.0
LONGEST_PAUSE_SECONDS = 60.0
LOG_BYTES = 2**20
# For how long a worker may not answer until that is said, and until it is killed.
SILENT_SECONDS = 30.0
FROZEN_SECONDS = 120.0
# A worker that ends with these does so again: what a person has written is wrong.
HOPELESS = (ExitCode.USAGE, ExitCode.CONFIG)
_WHAT = "keep the worker running"


class Keeper:
    """Looks after one worker. `over` says why there is nothing left to be done, once that is so."""

    def __init__(
        self,
        request: Request,
        *,
        silent_after: float = SILENT_SECONDS,
        frozen_after: float = FROZEN_SECONDS,
    ) -> None:
        """After `silent_after` seconds it is said that the worker does not answer; after
        `frozen_after` it is killed, and another one started."""
        self.layout = Layout(Path(request.folder))
        self.over = ""
        self.idle = False
        self._request = request
        self._silent_after, self._frozen_after = silent_after, frozen_after
        self._left_before: Left | None = None
        with contextlib.suppress(DataError):
            self._left_before = read_left(self.layout)
        self._log = self.layout.private / "watch.log"
        self._log_start = 0
        self._child: subprocess.Popen[bytes] | None = None
        self._alive: Identity | None = None  # as it was seen last
        self._endings = Endings()
        self._pulse = Pulse(self.layout.private / "status.json")
        self._silence = 0.0
        self._starts = 0
        self._due = 0.0
        # What a worker was once made of, as this cell wants it: another cell that wants it
        # otherwise may have it so, rather than each ending the other's for ever.
        self._had = ""

    def prepare(self) -> None:
        """Make the folder a worker's end, as is asked for. Raises UserError."""
        prepare(self.layout, self._request)

    def look(self) -> None:
        """Start the worker where none runs, and another one where it is not as is asked for, or
        does not answer. Raises RunFailedError when one would end at once, as the last one did."""
        made_of, holder = self._made_of(), read_holder(self.layout)
        self._note_end()
        if self._runs(holder):
            if time.monotonic() > self._due + LONGEST_PAUSE_SECONDS:
                self._starts = 0
            # It is about to begin, or is one that a person has started.
            if holder is None or not holder.process.alive() or not holder.made_of:
                return
            self._alive = holder.process
            if not self._ended(holder, made_of):
                return
        elif self._alive is not None:
            return  # it has ended this very moment: the next look says how
        elif why := self._why_over():
            self.over = why
            return
        if time.monotonic() >= self._due:
            self._start(made_of)

    def _runs(self, holder: Holder | None) -> bool:
        alive = holder is not None and holder.process.alive()
        return alive or bool(is_locked(self.layout.private / "lock"))

    def _note_end(self) -> None:
        """Take note when the worker has ended, and of how. Raises RunFailedError."""
        if self._alive is None or self._alive.alive():
            return
        ended, self._alive, self._silence = self._alive, None, 0.0
        code = self._reap(ended)
        if code == ExitCode.BUSY:
            return  # another cell's worker was there first
        if code in HOPELESS:
            said = last_error(self._log, self._log_start) or f"see {self._log}"
            raise RunFailedError(
                _WHAT,
                why=f"it ended with exit code {code}: {said}",
                hint="It would end so again. Mend that, and run the cell again; runs go on.",
            )
        self._endings.note("" if code is None else told_code(code, self._log, self._log_start))

    def _reap(self, ended: Identity) -> int | None:
        """Return the exit code of the worker that has ended, None where it was another's child."""
        child = self._child
        # One that waits for the lock is a child as well.
        if child is None or (child.pid != ended.pid and not has_ended(child)):
            return None
        self._child = None
        return child.wait()

    def _ended(self, holder: Holder, made_of: str) -> bool:
        """End a worker that is not as is asked for, or that is frozen; its stages go on."""
        self._silence = 0.0 if self._is_leaving() else self._pulse.silence(holder.mark)
        if self._silence > self._frozen_after:
            holder.process.signal(signal.SIGKILL)
            self._endings.note(f"it had not answered for {duration(self._silence)}, and was killed")
        elif made_of not in (holder.made_of, self._had):
            holder.process.signal(signal.SIGTERM)
            if not _is_gone(holder.process):
                holder.process.signal(signal.SIGKILL)
        else:
            self._had = made_of
            return False
        if not _is_gone(holder.process):
            why = f"process {holder.process.pid} does not end"
            raise RunFailedError("start the worker anew", why=why)
        self._reap(holder.process)
        self._alive, self._silence = None, 0.0
        return True

    def _is_leaving(self) -> bool:
        """Whether the worker says goodbye, which may take long, and does nothing else then."""
        with contextlib.suppress(DataError):
            status = read_status(self.layout)
            return bool(status and status.leaving)
        return False

    def _why_over(self) -> str:
        if self.layout.fence.exists():
            return (
                "another worker has taken over: this machine is not needed any more. To take it "
                f"back, stop the other one, remove {self.layout.private} and run the cell again."
            )
        with contextlib.suppress(DataError):
            left = read_left(self.layout)
            # One that left before this cell was run was wanted again.
            if left is not None and left.reason is Reason.IDLE and left != self._left_before:
                self.idle = True
                return left.why
        return ""

    def _start(self, made_of: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            if self._log.stat().st_size > LOG_BYTES:
                os.replace(self._log, self._log.with_suffix(".log.1"))
        command = [sys.executable, "-P", "-m", "syncd", "watch", "--folder", str(self.layout.root)]
        if self._request.stop_when_idle:
            command += ["--stop-when-idle", self._request.stop_when_idle]
        with open(self._log, "ab") as log:
            self._log_start = log.tell()
            self._child = subprocess.Popen(
                command,
                cwd=self.layout.root,
                env=_environ() | {VARIABLE: made_of},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                **own_session(),
            )
        pause = min(2.0**self._starts, LONGEST_PAUSE_SECONDS)
        self._starts, self._due = self._starts + 1, time.monotonic() + pause
        self._alive = Identity.of(self._child.pid)

    def _made_of(self) -> str:
        """What a worker depends on that is read only when it starts, as a digest."""
        digest = hashlib.sha256(importlib.metadata.version("syncd").encode())
        digest.update(self._request.stop_when_idle.encode())
        # rclone writes new tokens to its file, of which the worker has heard then.
        given = self._request.rclone
        config = [] if given is not None else [rclone_config(self.layout)]
        digest.update(hashlib.sha256((given or "").encode()).digest())
        for path in (self.layout.settings, self.layout.key, *config):
            with contextlib.suppress(FileNotFoundError):
                digest.update(hashlib.sha256(path.read_bytes()).digest())
        return digest.hexdigest()

    def frame(self, now: float) -> dict[str, Any]:
        """Return what the cell is to show, as text and as HTML."""
        status, notes = self._status(now), list(self._notes())
        lines = [render_status(status, now=now, ago=True) if status else "starting"]
        return {"text": "\n".join([*notes, *lines]), "html": render_html(status, notes, now=now)}

    def _status(self, now: float) -> Status | None:
        try:
            status = read_status(self.layout)
        except DataError:
            return None
        # It is written when it changes: while the worker answers, it is as of now.
        if status is None or status.leaving or not self._runs(read_holder(self.layout)):
            return status
        answers = self._silence <= self._silent_after
        return replace(status, time=now if answers else self._pulse.mark() / 1e9)

    def _notes(self) -> Iterator[str]:
        if self.over:
            yield self.over
            return
        if self._silence > self._silent_after:
            yield f"the worker has not answered for {duration(self._silence)}"
        if told := self._endings.told():
            yield told


def _is_gone(process: Identity) -> bool:
    """Wait for a process to end; return whether it has."""
    deadline = time.monotonic() + END_SECONDS
    while process.alive():
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.05)
    return True


def frames(keeper: Keeper) -> Iterator[dict[str, Any]]:
    """Yield a frame whenever there is something new to show, and now and then; the last has "end".

    Raises UserError when the worker cannot be kept running.
    """
    keeper.prepare()
    shown, due = "", 0.0
    while not keeper.over:
        keeper.look()
        frame = keeper.frame(time.time())
        news = _AS_OF.sub("", frame["text"])
        if news != shown or time.monotonic() >= due:
            shown, due = news, time.monotonic() + FRAME_SECONDS
            yield frame
        time.sleep(LOOK_SECONDS)
    yield keeper.frame(time.time()) | {"end": keeper.over, "release": keeper.idle}


# Of a worker that answers this is no news.
_AS_OF = re.compile(r"^worker \S+ on .*, as of .*$", re.MULTILINE)


def main() -> int:
    """Serve one cell; return the exit code."""
    try:
        request = decode(Request, loads(sys.stdin.buffer.read()))
        for frame in frames(Keeper(request)):
            _say(frame)
    except UserError as error:
        _say({"error": str(error)})
        return int(error.exit_code)
    except (BrokenPipeError, KeyboardInterrupt):
        return 0
    return 0


def _say(frame: Mapping[str, Any]) -> None:
    sys.stdout.write(dumps(dict(frame)).decode("ascii") + "\n")
    sys.stdout.flush()


def _environ() -> dict[str, str]:
    """The worker's environment: without settings that it has in its folder, and with this Python's
    programs first, since `python` in a stage means the notebook's."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SYNCD_")}
    path = os.pathsep.join((os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)))
    return {**kept, "PATH": path, "PYTHONUNBUFFERED": "1"}
