"""The worker's daemon: takes commands, runs them, and sends what comes of it.

What goes out first is what a person waits for: the journal, results, logs and the status; files
come after, and their larger contents travel beside, in the bulk loop.
"""

from __future__ import annotations

import json
import logging
import shutil
import socket
import time
from dataclasses import asdict
from pathlib import Path

import psutil

from protocol.journal import JournalRecord
from protocol.logs import drop_redraws, parse_log_line
from protocol.messages import (
    Content,
    DropFile,
    Grant,
    Journal,
    Message,
    PutFile,
    QueuedCommand,
    RunEnded,
    Snapshot,
    StatusReport,
)
from protocol.names import SHELL_STAGE
from protocol.progress import read_progress
from protocol.publish import make_dirs, publish_bytes
from protocol.states import State
from protocol.status import EndedLine, RunningLine, Status, WaitingLine, render_status
from protocol.wire import Role, Writer
from syncd import schedule
from syncd.causes import StopReason
from syncd.daemon import Daemon, Loop
from syncd.files import LocalFiles, RemoteFiles
from syncd.payload import PayloadStore
from syncd.records import JournalFile, ResultsFile
from syncd.runner import Runner
from syncd.streams import Tails

log = logging.getLogger("syncd")

STATUS_SECONDS = 1.0
HEARTBEAT_SECONDS = 20.0
ENDED_SHOWN = 10
FENCE_PATIENCE_SECONDS = 60.0


class Worker(Daemon):
    """The daemon at the VM."""

    runner: Runner

    def setup(self) -> None:
        root = self.layout.root
        for folder in (self.layout.artifacts, self.layout.store, self.layout.runs):
            make_dirs(folder)
        self.tails = Tails(self.state, root)
        self.local = LocalFiles(self.state, root, self.contents)
        self.inherited = RemoteFiles(self.state, root, self.contents, wanted=lambda path: True)
        self.payloads = PayloadStore(
            self.state, root, self.layout.private / "payload", self.payload_contents
        )
        self.journal = JournalFile(self.state, self.layout.journal)
        self.results = ResultsFile(self.state, self.layout.results)
        self._status: Status | None = None
        self._status_sent = ("", 0.0)
        self._unsent_since: float | None = None
        self._leaving = ""

    def recovered(self) -> None:
        self.results.publish()
        policy = schedule.Policy(
            stages=frozenset(self.settings.stages) or None, shell=self.settings.shell
        )
        self.runner = Runner(
            layout=self.layout,
            database=self.state,
            journal=self.journal,
            results=self.results,
            payloads=self.payloads,
            policy=policy,
            worker=str(self.link.writer),
        )

    def watched(self) -> list[tuple[Path, Loop]]:
        return [
            (self.layout.inbox, self.push_loop),
            (self.layout.runs, self.main_loop),
            (self.layout.store, self.bulk_loop),
            (self.layout.artifacts, self.bulk_loop),
        ]

    # Loops

    def tick(self) -> None:
        if self.fenced:
            self._give_way()
            return
        # Nothing is started on a half-recovered disk: checkpoints come first.
        if not self.inherited.missing():
            self.runner.round()
        self._write_status()
        if self.runner.plan.actions:
            self.push_loop.wake.set()
            self.main_loop.wake.set()

    def _give_way(self) -> None:
        self.runner.stop_all(StopReason.FENCED)
        deadline = time.monotonic() + FENCE_PATIENCE_SECONDS
        while any(e.alive for e in self.runner.entries) and time.monotonic() < deadline:
            self.runner.look()
            time.sleep(0.2)
        self.stop()

    def bulk(self) -> None:
        if self.inherited.missing() and self.inherited.fetch():
            self.main_loop.wake.set()
        ready = self.payloads.newest(0)
        self.payloads.unpack(self.runner.wanted_payloads())
        if self.payloads.newest(0) != ready:
            self.main_loop.wake.set()
            self.payloads.prune(self.runner.wanted_payloads())
        if self.local.scan():
            self.push_loop.wake.set()

    def leave(self) -> None:
        alive = [entry.run_id for entry in self.runner.entries if entry.alive]
        kept = f"; {', '.join(alive)} goes on without it" if alive else ""
        self._leaving = f"fenced: {self.fenced.why}" if self.fenced else f"stopped{kept}"
        self._write_status()

    # What arrives

    def apply(self, writer: Writer, message: Message) -> None:
        if writer.role is Role.WORKER:
            self._inherit(message)
        elif isinstance(message, QueuedCommand):
            self.state.run(
                "INSERT OR IGNORE INTO commands VALUES (?, ?)",
                message.number,
                json.dumps(asdict(message)),
            )
        elif isinstance(message, Content | Snapshot):
            # Before the link is open there is no runner, but the journal is already there.
            self.payloads.apply(message, self._wanted_payloads())
        elif isinstance(message, Grant):
            self.state.put("granted", message.writer)

    def _wanted_payloads(self) -> set[int]:
        records = self.journal.newest.values()
        return {r.snapshot for r in records if r.state is not State.ENDED and r.snapshot}

    def _inherit(self, message: Message) -> None:
        """Take over what a predecessor on another disk had come to."""
        if isinstance(message, Journal):
            self.journal.add(message.record)
        elif isinstance(message, RunEnded):
            self.results.add(message.record)
        elif isinstance(message, Content | PutFile | DropFile):
            self.inherited.apply(message)

    # What goes out

    def collect(self, budget: int) -> list[Message]:
        messages: list[Message] = [*self._new_records(budget), *self._new_results()]
        for path in self._growing():
            appends = self.tails.collect(path, budget, terminal=path.count("/") == 1)
            messages += appends
            budget -= sum(len(message.blob) for message in appends)
        messages += self._new_status()
        if budget > 0:
            messages += self.local.collect(budget)
        return messages

    def _new_records(self, budget: int) -> list[Message]:
        found = self.journal.since(int(self.state.get("journal_sent", 0)), budget)
        if found:
            self.state.put("journal_sent", found[-1][0])
        return [Journal(record=record) for _, record in found]

    def _new_results(self) -> list[Message]:
        found = self.results.since(int(self.state.get("runs_sent", 0)))
        if found:
            self.state.put("runs_sent", found[-1][0])
        return [RunEnded(record=record) for _, record in found]

    def _growing(self) -> list[str]:
        """Paths of growing files, logs first."""
        logs = sorted(path.name for path in self.layout.inbox.glob("*.log"))
        return [f"in/{name}" for name in logs] + self.local.growing

    def _new_status(self) -> list[Message]:
        status = self._status
        if status is None:
            return []
        text = render_status(status, now=status.time)
        shown = text.partition("\n")[2]  # the first line holds the time
        last, when = self._status_sent
        age = time.monotonic() - when
        if age < STATUS_SECONDS and not self._leaving:
            return []
        if shown == last and age < HEARTBEAT_SECONDS:
            return []
        self._status_sent = (shown, time.monotonic())
        return [StatusReport(status=asdict(status))]

    # Status

    def _write_status(self) -> None:
        status = self._make_status()
        text = render_status(status, now=status.time)
        old = render_status(self._status, now=self._status.time) if self._status else ""
        self._status = status
        if text.partition("\n")[2] != old.partition("\n")[2]:
            publish_bytes(self.layout.status, text.encode("utf-8"))

    def _make_status(self) -> Status:
        unsent = self._unsent()
        if not unsent:
            self._unsent_since = None
        elif self._unsent_since is None:
            self._unsent_since = time.time()
        entries, waits = self.runner.entries, self.runner.plan.waits
        return Status(
            time=time.time(),
            worker=str(self.link.writer),
            host=socket.gethostname(),
            sealed=self.sealed,
            running=tuple(self._running(e) for e in entries if e.alive),
            waiting=tuple(
                WaitingLine(number=e.number, line=e.line, why=waits[e.number])
                for e in entries
                if e.number in waits and not e.alive
            ),
            ended=self._ended(entries),
            unsent_bytes=unsent,
            unsent_since=self._unsent_since,
            disk_free=shutil.disk_usage(self.layout.root).free // 2**26 * 2**26,
            machine=_machine(),
            problems=tuple(self._all_problems()),
            leaving=self._leaving,
        )

    def _unsent(self) -> int:
        growing = sum(self.tails.behind(path) for path in self._growing())
        return self.link.unsent() + growing + self.local.unsent()

    def _all_problems(self) -> list[str]:
        found = [*self.problems.values(), *self.runner.problems.values(), *self.refusals()]
        for kept in (self.local.problems, self.inherited.problems):
            found += [f"{path}: {why}" for path, why in kept.items()]
        if missing := len(self.inherited.missing()):
            found.append(f"restoring {missing} files of an earlier worker; nothing starts before")
        return found + ([self.payloads.problem] if self.payloads.problem else [])

    def _running(self, entry: schedule.Entry) -> RunningLine:
        record = self.journal.newest[entry.number]
        shell = entry.stage == SHELL_STAGE
        path = self.layout.shell_log(entry.number) if shell else self.layout.log(entry.stage)
        return RunningLine(
            run_id=entry.run_id,
            stage=entry.stage,
            attempt=entry.attempts,
            started=record.time,
            progress=read_progress(self.runner.run_dir(entry.run_id) / "progress.json"),
            last_line=last_line(path),
        )

    def _ended(self, entries: list[schedule.Entry]) -> tuple[EndedLine, ...]:
        records = [self.journal.newest.get(entry.number) for entry in entries]
        ended = [r for r in records if r is not None and r.result is not None]
        ended.sort(key=lambda record: record.time)
        return tuple(_ended_line(record) for record in reversed(ended[-ENDED_SHOWN:]))


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
        with open(path, "rb") as file:
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
