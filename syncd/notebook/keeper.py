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
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from protocol.errors import DataError, RunFailedError, UserError
from protocol.paths import Layout
from protocol.publish import make_dirs, publish_bytes, publish_json
from protocol.schema import decode, dumps, loads
from protocol.status import Status, render_status
from protocol.wire import Role
from syncd.config import Key, load_key, make_private
from syncd.leaving import Reason, read_left
from syncd.notebook.html import render_html
from syncd.platform import Identity, has_ended, is_locked, own_session
from syncd.setup import initialise, rotate
from syncd.stages.attempt_files import read_file
from syncd.view import read_status

LOOK_SECONDS = 1.0
FRAME_SECONDS = 10.0
END_SECONDS = 60.0
LONGEST_PAUSE_SECONDS = 60.0
LOG_BYTES = 2**20


@dataclass(frozen=True, kw_only=True)
class Request:
    """What a cell asks for: its worker's folder, key ("" for none), and remotes, in order."""

    folder: str
    key: str
    remotes: tuple[str, ...]
    stop_when_idle: str = ""


@dataclass(frozen=True, kw_only=True)
class Kept:
    """The `syncd watch` that a keeper started: `made_of` tells whether it is what is wanted now."""

    process: Identity
    made_of: str


class Keeper:
    """Looks after one worker. `over` says why there is nothing left to be done, once that is so."""

    def __init__(self, request: Request) -> None:
        self.layout = Layout(Path(request.folder))
        self.over = ""
        self.idle = False
        self._request = request
        self._began = time.time()
        self._record = self.layout.private / "kept.json"
        self._log = self.layout.private / "watch.log"
        self._child: subprocess.Popen[bytes] | None = None
        self._starts = 0
        self._due = 0.0

    def prepare(self) -> None:
        """Make the folder a worker's end, as is asked for. Raises UserError."""
        request, layout = self._request, self.layout
        make_dirs(layout.root)
        make_private(layout)
        given = Key.parse(request.key) if request.key else None
        kept = load_key(layout, {})
        if given and kept and (kept.secret, kept.previous) != (given.secret, given.previous):
            self._rotate(request.key)
        elif given:
            given.save(layout)
        config = layout.private / "rclone.conf"
        initialise(
            layout,
            role=Role.WORKER,
            remote=request.remotes[0],
            fallback=request.remotes[1:],
            unsealed=given is None,
            rclone_config=str(config) if config.exists() and config.stat().st_size else "",
        )

    def _rotate(self, key: str) -> None:
        with tempfile.TemporaryDirectory(dir=self.layout.private) as folder:
            file = Path(folder) / "key"
            publish_bytes(file, key.encode("ascii"), mode=0o600)
            rotate(self.layout, key_file=file)

    def look(self) -> None:
        """Start the worker where none runs, and another one where it is not as is asked for."""
        made_of, kept = self._made_of(), self._kept()
        if self._runs(kept):
            if time.monotonic() > self._due + LONGEST_PAUSE_SECONDS:
                self._starts = 0
            if kept is None or not kept.process.alive() or kept.made_of == made_of:
                return
            self._end(kept.process)
        elif why := self._why_over():
            self.over = why
            return
        if time.monotonic() >= self._due:
            self._start(made_of)

    def _runs(self, kept: Kept | None) -> bool:
        if self._child is not None and has_ended(self._child):
            self._child.wait()
            self._child = None
        alive = kept is not None and kept.process.alive()
        return alive or bool(is_locked(self.layout.private / "lock"))

    def _why_over(self) -> str:
        if self.layout.fence.exists():
            return "another worker has taken over: this machine is not needed any more"
        with contextlib.suppress(DataError):
            left = read_left(self.layout)
            # One that left before this cell was run was wanted again.
            if left is not None and left.reason is Reason.IDLE and left.time >= self._began:
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
            self._child = subprocess.Popen(
                command,
                cwd=self.layout.root,
                env=_environ(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                **own_session(),
            )
        pause = min(2.0**self._starts, LONGEST_PAUSE_SECONDS)
        self._starts, self._due = self._starts + 1, time.monotonic() + pause
        if process := Identity.of(self._child.pid):
            kept = Kept(process=process, made_of=made_of)
            publish_json(self._record, asdict(kept), mode=0o600)

    def _end(self, process: Identity) -> None:
        """End a worker, whose stages go on. Raises RunFailedError when it does not end."""
        process.signal(signal.SIGTERM)
        deadline = time.monotonic() + END_SECONDS
        while process.alive():
            if time.monotonic() >= deadline:
                why = f"process {process.pid} does not end"
                raise RunFailedError("start the worker anew", why=why)
            time.sleep(0.05)

    def _kept(self) -> Kept | None:
        with contextlib.suppress(DataError):
            return read_file(self._record, Kept)
        return None

    def _made_of(self) -> str:
        """What a worker depends on that is read only when it starts, as a digest."""
        digest = hashlib.sha256(importlib.metadata.version("syncd").encode())
        digest.update(self._request.stop_when_idle.encode())
        for path in (self.layout.settings, self.layout.key, self.layout.private / "rclone.conf"):
            with contextlib.suppress(FileNotFoundError):
                digest.update(hashlib.sha256(path.read_bytes()).digest())
        return digest.hexdigest()

    def frame(self, now: float) -> dict[str, Any]:
        """Return what the cell is to show, as text and as HTML."""
        status, notes = self._status(now), list(self._notes())
        lines = [*notes, render_status(status, now=now, ago=True) if status else "starting"]
        return {"text": "\n".join(lines), "html": render_html(status, notes, now=now)}

    def _status(self, now: float) -> Status | None:
        try:
            status = read_status(self.layout)
        except DataError:
            return None
        # It is written when it changes: while the worker runs, it is as of now.
        runs = status and not status.leaving and self._runs(self._kept())
        return replace(status, time=now) if status and runs else status

    def _notes(self) -> Iterator[str]:
        if self.over:
            yield self.over
        elif self._starts > 1:
            yield f"the worker ended, and was started again: {self._last_line()}"

    def _last_line(self) -> str:
        with contextlib.suppress(OSError):
            lines = self._log.read_bytes()[-4096:].decode("utf-8", "replace").splitlines()
            return lines[-1] if lines else ""
        return ""


def frames(keeper: Keeper) -> Iterator[dict[str, Any]]:
    """Yield a frame whenever there is something new to show, and now and then; the last has "end".

    Raises UserError when the worker cannot be kept running.
    """
    keeper.prepare()
    shown, due = "", 0.0
    while not keeper.over:
        keeper.look()
        frame = keeper.frame(time.time())
        news = frame["text"].partition("\n")[2]
        if news != shown or time.monotonic() >= due:
            shown, due = news, time.monotonic() + FRAME_SECONDS
            yield frame
        time.sleep(LOOK_SECONDS)
    yield keeper.frame(time.time()) | {"end": keeper.over, "release": keeper.idle}


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
