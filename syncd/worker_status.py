"""The worker's status: made from what its parts know, written, and sent when it is news."""

from __future__ import annotations

import heapq
import json
import math
import os
import shutil
import socket
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from pathlib import Path

import psutil

from protocol.files import open_regular
from protocol.journal import JournalRecord
from protocol.logs import drop_redraws, parse_log_line
from protocol.messages import StatusReport
from protocol.names import SHELL_STAGE
from protocol.paths import Layout
from protocol.progress import read_progress
from protocol.publish import publish_bytes
from protocol.status import EndedLine, RunningLine, Status, WaitingLine, render_status
from syncd.delivery.checkpoints import Checkpoints
from syncd.delivery.redraws import Redraws
from syncd.gpu_meter import GpuMeter
from syncd.stages.runner import Runner
from syncd.stages.schedule import Entry
from syncd.unsent import WaitingSince

STATUS_SECONDS = 1.0
HEARTBEAT_SECONDS = 20.0
ENDED_SHOWN = 10
# Free space is shown to so many bytes, so that a busy disk is no news by itself.
DISK_STEP = 2**26
# A run that has written no checkpoint is told to be at risk after so long: it may be one of those
# that never do, and a short one is soon over.
TOLD_AT_RISK_SECONDS = 300.0


class WorkerStatus:
    """Keeps `status.txt`, and decides when the other end is told."""

    def __init__(self, layout: Layout, *, worker: str, sealed: bool) -> None:
        self.leaving = ""
        self.heartbeat = HEARTBEAT_SECONDS  # how often the status is sent when it is no news
        self._layout = layout
        self._worker = worker
        self._sealed = sealed
        self._status: Status | None = None
        self._news = self._progress = self._written = ""
        self._told_unsent = False  # whether the status that was written has something unsent
        self._sent = ("", "", -math.inf)
        self._redraws = Redraws()
        self._waiting = WaitingSince()
        self._gpus = GpuMeter()

    def update(
        self,
        runner: Runner,
        *,
        unsent: int,
        progress: object,
        checkpoints: Checkpoints,
        inherited: Callable[[str], str],
        problems: Iterable[str],
    ) -> None:
        """Take stock, and write `status.txt` if it changed. `.syncd/status.json` is written with
        it, and touched each time: that shows who looks on that this daemon is not frozen.

        `progress` changes whenever something of the `unsent` bytes has got through; `inherited`
        names the checkpoint of a run that an earlier worker has left on the remote, "" for none.
        """
        since = self._waiting.update(waits=unsent > 0, progress=progress)
        waits = runner.plan.waits
        self._status = Status(
            time=time.time(),
            worker=self._worker,
            host=socket.gethostname(),
            sealed=self._sealed,
            running=tuple(
                self._running(runner, entry, checkpoints, inherited)
                for entry in runner.entries
                if entry.alive
            ),
            waiting=tuple(
                WaitingLine(number=e.number, line=e.line, why=waits[e.number])
                for e in runner.entries
                if e.number in waits and not e.alive
            ),
            ended=_ended(runner),
            unsent_bytes=unsent,
            unsent_since=since,
            disk_free=shutil.disk_usage(self._layout.root).free // DISK_STEP * DISK_STEP,
            machine=self._machine(busy=any(entry.alive for entry in runner.entries)),
            heartbeat=self.heartbeat,
            problems=tuple(problems),
            leaving=self.leaving,
        )
        text = render_status(self._status, now=self._status.time)
        self._news = _news(self._status)
        self._progress = text.partition("\n")[2]
        self._write(self._status, text)

    def _write(self, status: Status, text: str) -> None:
        """Write the status where it changed, else show that the worker is alive.

        Also when nothing waits any more that was too little to be shown: who reads the status tells
        by its own clock for how long that has waited.
        """
        news = self._progress != self._written
        if news:
            publish_bytes(self._layout.status, text.encode("utf-8"))
            self._written = self._progress
        path = self._layout.private / "status.json"
        try:
            if not (news or (self._told_unsent and not status.unsent_bytes)):
                os.utime(path)
                return
        except FileNotFoundError:
            pass  # it was taken away
        publish_bytes(path, json.dumps(asdict(status)).encode("utf-8"), mode=0o600)
        self._told_unsent = status.unsent_bytes > 0

    def is_due(self, *, along: bool = False) -> bool:
        """Whether the status is to be sent, `along` with something else if that is so.

        Soon when it is news, now and then when runs have gone on, else as a heartbeat.
        """
        if self._status is None:
            return False
        news, progress, when = self._sent
        age = time.monotonic() - when
        if self._news != news:
            return age >= (0.0 if self.leaving else STATUS_SECONDS)
        went_on = self._status.running and self._progress != progress
        return age >= self.heartbeat or bool(went_on and self._redraws.due(along=along))

    def collect(self, *, along: bool) -> list[StatusReport]:
        """Return the status if it is due."""
        if self._status is None or not self.is_due(along=along):
            return []
        if self._news != self._sent[0]:
            self._redraws.begin()
        self._redraws.said()
        self._sent = (self._news, self._progress, time.monotonic())
        return [StatusReport(status=asdict(self._status))]

    def has_said_goodbye(self) -> bool:
        """Whether a status was collected that says why the worker leaves, and nothing is news."""
        return bool(self._status and self._status.leaving) and self._news == self._sent[0]

    def restate(self) -> list[StatusReport]:
        """Return the status as it is, whether it is news or not."""
        return [] if self._status is None else [StatusReport(status=asdict(self._status))]

    def _machine(self, *, busy: bool) -> dict[str, str]:
        memory = psutil.virtual_memory()
        gpus = self._gpus.shown() if busy else {}
        return {"memory used": f"{round(memory.percent, -1):.0f}%", **gpus}

    def _running(
        self,
        runner: Runner,
        entry: Entry,
        checkpoints: Checkpoints,
        inherited: Callable[[str], str],
    ) -> RunningLine:
        started = runner.journal.newest[entry.number].time
        safe = checkpoints.newest_safe(entry.run_id)
        makes_some = entry.stage != SHELL_STAGE and time.time() - started > TOLD_AT_RISK_SECONDS
        since = started if makes_some or checkpoints.has_any(entry.run_id) else None
        return RunningLine(
            run_id=entry.run_id,
            stage=entry.stage,
            attempt=entry.attempts,
            started=started,
            progress=read_progress(runner.run_dir(entry.run_id) / "progress.json"),
            last_line=last_line(self._layout.run_log(entry.run_id)),
            # What a run began with is safe, also while this worker has not yet said it again.
            checkpoint=safe.name if safe else inherited(entry.run_id),
            at_risk_since=safe.made if safe else since,
        )


def _news(status: Status) -> str:
    """Return what of a status a person waits for: not how far runs are, nor what changes on any
    machine by itself. The heartbeat is in it: who reads it counts on that."""
    running = tuple(
        replace(run, progress=None, last_line="", checkpoint="", at_risk_since=None)
        for run in status.running
    )
    told = replace(
        status,
        time=0.0,
        running=running,
        unsent_bytes=0,
        unsent_since=None,
        disk_free=0,
        machine={},
    )
    return json.dumps(asdict(told))


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
