"""The worker's status: made from what its parts know, written, and sent when it is news."""

from __future__ import annotations

import heapq
import json
import shutil
import socket
import time
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

import psutil

from protocol.files import open_regular
from protocol.journal import JournalRecord
from protocol.logs import drop_redraws, parse_log_line
from protocol.messages import StatusReport
from protocol.paths import Layout
from protocol.progress import read_progress
from protocol.publish import publish_bytes
from protocol.status import EndedLine, RunningLine, Status, WaitingLine, render_status
from syncd.stages.runner import Runner
from syncd.stages.schedule import Entry

STATUS_SECONDS = 1.0
HEARTBEAT_SECONDS = 20.0
ENDED_SHOWN = 10
# Free space is shown to so many bytes, so that a busy disk is no news by itself.
DISK_STEP = 2**26


class WorkerStatus:
    """Keeps `status.txt`, and decides when the other end is told."""

    def __init__(self, layout: Layout, *, worker: str, sealed: bool) -> None:
        self.leaving = ""
        self._layout = layout
        self._worker = worker
        self._sealed = sealed
        self._status: Status | None = None
        self._news = self._written = ""
        self._sent = ("", 0.0)
        self._unsent_since: float | None = None

    def update(self, runner: Runner, *, unsent: int, problems: Iterable[str]) -> None:
        """Take stock, and write `status.txt` if it changed."""
        if not unsent:
            self._unsent_since = None
        elif self._unsent_since is None:
            self._unsent_since = time.time()
        waits = runner.plan.waits
        self._status = Status(
            time=time.time(),
            worker=self._worker,
            host=socket.gethostname(),
            sealed=self._sealed,
            running=tuple(self._running(runner, e) for e in runner.entries if e.alive),
            waiting=tuple(
                WaitingLine(number=e.number, line=e.line, why=waits[e.number])
                for e in runner.entries
                if e.number in waits and not e.alive
            ),
            ended=_ended(runner),
            unsent_bytes=unsent,
            unsent_since=self._unsent_since,
            disk_free=shutil.disk_usage(self._layout.root).free // DISK_STEP * DISK_STEP,
            machine=_machine(),
            problems=tuple(problems),
            leaving=self.leaving,
        )
        text = render_status(self._status, now=self._status.time)
        # What of a status is worth telling: all but the time, which stands in the first line.
        self._news = text.partition("\n")[2]
        if self._news != self._written:
            publish_bytes(self._layout.status, text.encode("utf-8"))
            kept = json.dumps(asdict(self._status)).encode("utf-8")
            publish_bytes(self._layout.private / "status.json", kept, mode=0o600)
            self._written = self._news

    def collect(self) -> list[StatusReport]:
        """Return the status when it is news, or when it is time for a heartbeat."""
        if self._status is None:
            return []
        news, (last, when) = self._news, self._sent
        age = time.monotonic() - when
        soon = 0.0 if self.leaving else STATUS_SECONDS
        if age < (HEARTBEAT_SECONDS if news == last else soon):
            return []
        self._sent = (news, time.monotonic())
        return [StatusReport(status=asdict(self._status))]

    def restate(self) -> list[StatusReport]:
        """Return the status as it is, whether it is news or not."""
        return [] if self._status is None else [StatusReport(status=asdict(self._status))]

    def _running(self, runner: Runner, entry: Entry) -> RunningLine:
        return RunningLine(
            run_id=entry.run_id,
            stage=entry.stage,
            attempt=entry.attempts,
            started=runner.journal.newest[entry.number].time,
            progress=read_progress(runner.run_dir(entry.run_id) / "progress.json"),
            last_line=last_line(self._layout.run_log(entry.run_id)),
        )


def _ended(runner: Runner) -> tuple[EndedLine, ...]:
    ended = (record for record in runner.journal.newest.values() if record.result is not None)
    newest = heapq.nlargest(ENDED_SHOWN, ended, key=lambda record: record.time)
    return tuple(_ended_line(record) for record in newest)


def _ended_line(record: JournalRecord) -> EndedLine:
    assert record.result is not None
    return EndedLine(
        number=record.number,
        line=record.line,
        result=record.result,
        cause=record.cause,
        ended=record.time,
    )


def last_line(path: Path, *, window: int = 4096) -> str:
    """Return the last line of a log that is not ours and not blank, as a terminal would show it."""
    try:
        with open_regular(path) as file:
            file.seek(max(file.seek(0, 2) - window, 0))
            data = file.read(window)
    except OSError:
        return ""
    for line in reversed(drop_redraws(data).splitlines()):
        text = line.decode("utf-8", "replace").strip()
        if text and parse_log_line(line) is None:
            return text[-200:]
    return ""


def _machine() -> dict[str, str]:
    memory = psutil.virtual_memory()
    return {"memory used": f"{round(memory.percent, -1):.0f}%"}
