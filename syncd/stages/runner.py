"""The stage runner: does what `schedule.plan` decides, and tells how every run goes.

All that it knows is on the disk: commands and journal, and each attempt's folder. A round looks at
the attempts, records ends, plans, acts. A daemon killed anywhere in a round does the same round
again after its restart, and finds what was already done.
"""

from __future__ import annotations

import json
import logging
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from protocol.errors import BusyError, ConfigError, UserError
from protocol.journal import JournalRecord
from protocol.messages import QueuedCommand
from protocol.names import SHELL_STAGE
from protocol.paths import Layout
from protocol.publish import make_dirs
from protocol.queue import Command, RunCommand, ShellCommand, parse_command
from protocol.results import RunRecord, StageReport, read_report
from protocol.schema import decode
from protocol.stage_env import StageEnvironment
from protocol.stages import Resume, Stage
from protocol.states import Result, State
from syncd.delivery.payload import PayloadStore, read_stages
from syncd.delivery.streams import rotate
from syncd.records import JournalFile, ResultsFile
from syncd.stages import attempt, schedule
from syncd.stages.attempt_files import DEFAULT_GRACE, AttemptSpec, read_spec
from syncd.stages.causes import ExitRecord, StopReason
from syncd.state import State as Database

log = logging.getLogger("syncd")

_RETRIED = (Result.FAILED, Result.KILLED, Result.TIMED_OUT, Result.FAILED_TO_SPAWN)


class Runner:
    """Runs the commands of one worker."""

    def __init__(
        self,
        *,
        layout: Layout,
        database: Database,
        journal: JournalFile,
        results: ResultsFile,
        payloads: PayloadStore,
        policy: schedule.Policy,
        worker: str,
        is_said: Callable[[JournalRecord], bool],
    ) -> None:
        self.layout = layout
        self.journal = journal
        self.results = results
        self.policy = policy
        self.worker = worker
        self.plan = schedule.Plan()
        self.entries: list[schedule.Entry] = []
        self.problems: dict[str, str] = {}
        self._database = database
        self._is_said = is_said
        self._giving_way = False
        self._payloads = payloads
        self._commands: dict[int, tuple[QueuedCommand, Command | None]] = {}
        self._stages: dict[int, schedule.Payload] = {}
        self._retry_at: dict[int, float] = {}
        self._over: dict[int, schedule.Entry] = {}

    # What is known

    def commands(self) -> dict[int, tuple[QueuedCommand, Command | None]]:
        """Every command that arrived, by number."""
        known = max(self._commands, default=0)
        rows = self._database.rows("SELECT message FROM commands WHERE number > ?", known)
        for (text,) in rows:
            message = decode(QueuedCommand, json.loads(text))
            try:
                command = parse_command(message.line)
            except UserError as error:
                log.warning("command %d: %s", message.number, error)
                command = None
            self._commands[message.number] = (message, command)
        return self._commands

    def _ready_payloads(self) -> dict[int, schedule.Payload]:
        orders = self.journal.payloads_in_use()
        newest = self._payloads.newest(0)
        if newest is not None:
            orders.add(newest.order)
        for order in orders - set(self._stages):
            payload = self._payloads.exactly(order)
            if payload is None:
                continue
            try:
                self._stages[order] = schedule.Payload(order, read_stages(payload.folder))
            except ConfigError as error:
                self._stages[order] = schedule.Payload(order, error=str(error))
        self._stages = {o: p for o, p in self._stages.items() if o in orders}
        return self._stages

    def _entry(self, message: QueuedCommand, command: Command | None) -> schedule.Entry:
        if message.number in self._over:
            return self._over[message.number]
        entry = self._look_up(message, command)
        if entry.state is State.ENDED:
            self._over[message.number] = entry
        return entry

    def _look_up(self, message: QueuedCommand, command: Command | None) -> schedule.Entry:
        record = self.journal.newest.get(message.number)
        if record is None:
            return schedule.Entry(
                number=message.number,
                line=message.line,
                run_id=message.run_id,
                command=command,
                error=message.error,
                snapshot=message.snapshot,
            )
        mine = record.worker == self.worker
        alive = mine and record.state is State.STARTED and self._look(message, record)
        record = self.journal.newest[message.number]
        return schedule.Entry(
            number=message.number,
            line=message.line,
            run_id=message.run_id,
            command=command,
            error=message.error,
            snapshot=record.snapshot,
            state=record.state,
            result=record.result,
            alive=alive,
            inherited=not mine,
            published=record.state is not State.CLAIMED or self._is_published(record),
            not_before=self._retry_at.get(message.number, 0.0),
            attempts=record.attempt,
        )

    def _is_published(self, record: JournalRecord) -> bool:
        return self._is_said(record) and self._database.row("SELECT 1 FROM outbox") is None

    def run_dir(self, run_id: str) -> Path:
        """The folder of a run's attempts."""
        return self.layout.runs / run_id

    # One round

    def round(self) -> None:
        """Look at every attempt, record what ended, and do what comes next."""
        self.look()
        payloads = self._ready_payloads()
        self.plan = schedule.plan(
            self.entries,
            payloads=payloads,
            shares=self._shares(),
            policy=self.policy,
            now=time.time(),
        )
        entries = {entry.number: entry for entry in self.entries}
        for action in self.plan.actions:
            self._act(action, entries[action.number])
        if self.plan.actions:
            self.results.publish()

    def look(self) -> None:
        """Look at every attempt, and record what ended."""
        self.entries = [self._entry(*known) for _, known in sorted(self.commands().items())]

    def is_busy(self) -> bool:
        """Whether some command has not ended, as the last round saw it."""
        return any(entry.state is not State.ENDED for entry in self.entries)

    def _shares(self) -> dict[int, float]:
        shares: dict[int, float] = {}
        for entry in self.entries:
            payload = self._stages.get(entry.snapshot)
            if entry.alive and payload and entry.stage in payload.stages:
                shares[entry.number] = payload.stages[entry.stage].gpu
        return shares

    def _act(self, action: schedule.Action, entry: schedule.Entry) -> None:
        if isinstance(action, schedule.End):
            self._end(entry, action.result, action.cause)
        elif isinstance(action, schedule.Claim):
            self._record(entry, State.CLAIMED)
        elif isinstance(action, schedule.Stop):
            attempt.request_stop(self._attempt_dir(entry), StopReason.STOPPED)
        else:
            self._start(entry, action)

    def _attempt_dir(self, entry: schedule.Entry) -> Path:
        return attempt.attempt_dir(self.run_dir(entry.run_id), entry.attempts)

    def _record(
        self,
        entry: schedule.Entry,
        state: State,
        *,
        attempts: int = 0,
        snapshot: int = 0,
        ended: ExitRecord | None = None,
        result: Result | None = None,
        cause: str = "",
    ) -> None:
        self.journal.add(
            JournalRecord(
                number=entry.number,
                line=entry.line,
                state=state,
                time=time.time(),
                worker=self.worker,
                run_id=entry.run_id,
                attempt=attempts,
                snapshot=snapshot,
                result=ended.result if ended else result,
                cause=ended.cause if ended else cause,
                exit_code=ended.exit_code if ended else None,
                signal=ended.signal if ended else None,
                started=ended.started if ended else None,
            )
        )
        told = f" as {ended.result if ended else result}" if state is State.ENDED else ""
        why = ended.cause if ended else cause
        log.info("%s %s%s%s", entry.line[:60], state, told, f": {why}" if why else "")

    def _end(self, entry: schedule.Entry, result: Result, cause: str) -> None:
        """End a command that has no process; one that had attempts keeps its result."""
        if entry.attempts:
            self._keep_result(entry, result, cause, None)
        self._record(
            entry,
            State.ENDED,
            attempts=entry.attempts,
            snapshot=entry.snapshot,
            result=result,
            cause=cause,
        )

    # Starting

    def _start(self, entry: schedule.Entry, action: schedule.Start) -> None:
        number = entry.attempts + 1
        if entry.state is State.QUEUED:
            self._record(entry, State.CLAIMED, snapshot=action.payload)
        try:
            folder = self._prepare(entry, action, number)
        except (OSError, UserError) as error:
            self.problems[entry.run_id] = f"{entry.run_id} cannot be started: {error}"
            return
        self._record(entry, State.STARTED, attempts=number, snapshot=action.payload)
        self._spawn(entry.run_id, folder)

    def _spawn(self, run_id: str, folder: Path) -> None:
        try:
            attempt.spawn(folder)
            self.problems.pop(run_id, None)
        except (OSError, UserError) as error:
            # The next round finds it never started, and tries again.
            self.problems[run_id] = f"{run_id} cannot be started: {error}"

    def _prepare(self, entry: schedule.Entry, action: schedule.Start, number: int) -> Path:
        """Make the attempt's folder with its spec, and the folders that its stage is given."""
        run_dir = self.run_dir(entry.run_id)
        payload = self._payloads.exactly(action.payload)
        cwd = payload.folder if payload else self.layout.root
        environment = StageEnvironment(
            run_id=entry.run_id,
            stage=entry.stage,
            attempt=number,
            checkpoint_dir=self.layout.store / "checkpoints" / entry.run_id,
            artifact_dir=self.layout.artifacts / entry.run_id,
            result_file=run_dir / "report.json",
            progress_file=run_dir / "progress.json",
            store=self.layout.store,
            payload=cwd,
            results=self.layout.results,
            after=action.after,
        )
        stage = self._stage_of(entry, action.payload)
        if stage.resume is Resume.RESTART:
            shutil.rmtree(environment.checkpoint_dir, ignore_errors=True)
        for folder in (run_dir, environment.checkpoint_dir, environment.artifact_dir):
            make_dirs(folder)
        for stale in (environment.result_file, environment.progress_file):
            stale.unlink(missing_ok=True)
        shell = isinstance(entry.command, ShellCommand)
        log_file = self.layout.run_log(entry.run_id)
        rotate(log_file)
        return attempt.prepare(
            run_dir,
            AttemptSpec(
                run_id=entry.run_id,
                stage=entry.stage,
                attempt=number,
                line=entry.line,
                command=stage.command,
                environ={**stage.env, **environment.to_environ()},
                cwd=str(self.layout.root if shell else cwd),
                log=str(log_file),
                timeout=stage.timeout,
                grace=stage.grace,
            ),
        )

    def _stage_of(self, entry: schedule.Entry, payload: int) -> Stage:
        if isinstance(entry.command, ShellCommand):
            return Stage(name=SHELL_STAGE, command=entry.command.script, gpu=0.0)
        return self._stages[payload].stages[entry.stage]

    # Ending

    def _look(self, message: QueuedCommand, record: JournalRecord) -> bool:
        """Observe an attempt and record its end; return whether it has a process."""
        folder = attempt.attempt_dir(self.run_dir(message.run_id), record.attempt)
        try:
            seen = attempt.observe(folder)
            if isinstance(seen, attempt.NeverStarted) and self._giving_way:
                return False
            if isinstance(seen, attempt.NeverStarted):
                self._spawn(message.run_id, folder)
                return True
            if isinstance(seen, attempt.Orphaned | attempt.Vanished):
                log.warning("%s lost its supervisor", message.run_id)
                seen = attempt.Ended(attempt.kill_orphan(folder, _grace(folder)))
        except BusyError as error:
            self.problems[message.run_id] = str(error)
            return True
        if isinstance(seen, attempt.Ended):
            self._ended(message, record, seen.record)
            return False
        return True

    def _ended(self, message: QueuedCommand, record: JournalRecord, ended: ExitRecord) -> None:
        """Record an attempt's end as the command's, unless another attempt follows."""
        entry = schedule.Entry(
            number=message.number,
            line=message.line,
            run_id=message.run_id,
            command=self._commands[message.number][1],
            snapshot=record.snapshot,
            attempts=record.attempt,
        )
        if ended.result in _RETRIED and self._retries_left(entry) > 0:
            self._retry_at[entry.number] = ended.ended + schedule.backoff(entry.attempts)
            return
        self._keep_result(entry, ended.result, ended.cause, ended)
        self._record(
            entry, State.ENDED, attempts=entry.attempts, snapshot=entry.snapshot, ended=ended
        )

    def _retries_left(self, entry: schedule.Entry) -> int:
        if not isinstance(entry.command, RunCommand):
            return 0
        payload = self._ready_payloads().get(entry.snapshot)
        stage = payload.stages.get(entry.stage) if payload else None
        used = self.journal.attempts(entry.number, self.worker) - 1
        return stage.retries - used if stage else 0

    def _keep_result(
        self, entry: schedule.Entry, result: Result, cause: str, ended: ExitRecord | None
    ) -> None:
        report: StageReport | None = None
        path = self.run_dir(entry.run_id) / "report.json"
        if path.exists():
            try:
                report = read_report(path, run_id=entry.run_id, stage=entry.stage)
            except UserError as error:
                cause = f"{cause}; its report is unusable: {error.why}".removeprefix("; ")
        self.results.add(
            RunRecord(
                run_id=entry.run_id,
                stage=entry.stage,
                line=entry.line,
                result=result,
                cause=cause,
                exit_code=ended.exit_code if ended else None,
                signal=ended.signal if ended else None,
                attempts=entry.attempts,
                started=ended.started if ended else None,
                ended=ended.ended if ended else time.time(),
                snapshot=entry.snapshot,
                after=self._after(entry),
                report=report,
            )
        )
        self.results.publish()

    def _after(self, entry: schedule.Entry) -> Mapping[str, str]:
        """The runs that this one came after, as its last attempt was told."""
        folder = attempt.attempt_dir(self.run_dir(entry.run_id), entry.attempts)
        try:
            after = json.loads(read_spec(folder).environ["SYNCD_AFTER"])
        except (UserError, KeyError, ValueError):
            return {}
        return {str(k): str(v) for k, v in after.items()} if isinstance(after, dict) else {}

    def give_way(self) -> bool:
        """Start nothing any more, and ask every living attempt to end; return whether all have."""
        self._giving_way = True
        self.look()
        alive = [entry for entry in self.entries if entry.alive]
        for entry in alive:
            attempt.request_stop(self._attempt_dir(entry), StopReason.FENCED)
        return not alive


def _grace(folder: Path) -> float:
    try:
        return read_spec(folder).grace
    except UserError:
        return DEFAULT_GRACE
