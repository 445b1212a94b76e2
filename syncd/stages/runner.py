"""The stage runner: does what `schedule.plan` decides, and tells how every run goes.

All that it knows is on the disk: commands and journal, and each attempt's folder. A round looks at
the attempts, records ends, plans, acts. A daemon killed anywhere in a round does the same round
again after its restart, and finds what was already done.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from protocol.errors import ConfigError, DataError, UsageError, UserError
from protocol.journal import JournalRecord
from protocol.messages import QueuedCommand
from protocol.names import SHELL_STAGE
from protocol.paths import Layout
from protocol.publish import make_dirs, remove_leftovers
from protocol.queue import Command, RunCommand, ShellCommand, StopCommand, parse_command
from protocol.results import RunRecord, StageReport, read_report
from protocol.schema import decode
from protocol.stage_env import StageEnvironment
from protocol.stages import Resume, Stage
from protocol.states import Result, State
from syncd.delivery.payload import PayloadStore, read_stages
from syncd.log_parts import rotate
from syncd.records import JournalFile, ResultsFile
from syncd.stages import attempt, schedule
from syncd.stages.attempt_files import EXIT, AttemptSpec, read_file, read_spec
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
        is_published: Callable[[JournalRecord], bool],
        doubtful: int,
        why_gone: Callable[[str, str], str],
    ) -> None:
        """`is_published` says whether a claim is on the remote, and no other worker was there then;
        up to command `doubtful` a worker whose records cannot be read may have run some;
        `why_gone` tells, of a worker and a run, what became of the worker.
        """
        self.layout = layout
        self.journal = journal
        self.results = results
        self.policy = policy
        self.worker = worker
        self.plan = schedule.Plan()
        self.entries: list[schedule.Entry] = []
        self.problems: dict[str, str] = {}
        self._database = database
        self._is_published = is_published
        self._doubtful = doubtful
        self._why_gone = why_gone
        self._giving_way = False
        self._payloads = payloads
        self._commands: dict[int, tuple[QueuedCommand, Command | None]] = {}
        self._stages: dict[int, schedule.Payload] = {}
        # The last attempt of runs that are tried again, and when, by the monotonic clock.
        self._failed: dict[int, tuple[ExitRecord, float]] = {}
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
            doubt = isinstance(command, ShellCommand) and message.number <= self._doubtful
            return schedule.Entry(
                number=message.number,
                line=message.line,
                run_id=message.run_id,
                command=command,
                error=self._error(message),
                snapshot=message.snapshot,
                state=State.CLAIMED if doubt else State.QUEUED,
                inherited=doubt,
            )
        mine = record.worker == self.worker
        alive = mine and record.state is State.STARTED and self._look(message, record)
        record = self.journal.newest[message.number]
        failed = self._failed_as(message.number, record.attempt)
        return schedule.Entry(
            number=message.number,
            line=message.line,
            run_id=message.run_id,
            command=command,
            error=self._error(message),
            snapshot=record.snapshot,
            state=record.state,
            result=record.result,
            alive=alive,
            inherited=not mine,
            published=record.state is not State.CLAIMED or self._is_published(record),
            not_before=self._failed[message.number][1] if failed else 0.0,
            attempts=record.attempt,
        )

    def _failed_as(self, number: int, attempts: int) -> ExitRecord | None:
        failed, _ = self._failed.get(number, (None, 0.0))
        return failed if failed and failed.attempt == attempts else None

    def _error(self, message: QueuedCommand) -> str:
        """Why a command is refused before it is looked at, or ""."""
        if message.unsealed and not self.policy.unsealed_lines:
            return "this worker's policy allows no unsealed lines"
        return message.error

    def run_dir(self, run_id: str) -> Path:
        """The folder of a run's attempts."""
        return self.layout.runs / run_id

    # One round

    def round(self) -> None:
        """Look at every attempt, record what ended, and do what comes next."""
        self.look()
        if self.layout.fence.exists():
            return
        payloads = self._ready_payloads()
        self.plan = schedule.plan(
            self.entries,
            payloads=payloads,
            shares=self._shares(),
            policy=self.policy,
            now=time.monotonic(),
        )
        entries = {entry.number: entry for entry in self.entries}
        for action in self.plan.actions:
            self._act(action, entries[action.number])
        if self.plan.actions:
            self.results.publish()

    def look(self) -> None:
        """Look at every attempt, and record what ended."""
        self.entries = [self._entry(*known) for _, known in sorted(self.commands().items())]

    def is_running(self) -> bool:
        """Whether some attempt is alive, or about to be, as the last round saw it."""
        return any(e.alive or e.state is State.CLAIMED for e in self.entries)

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
            self._end(entry, action.result, self._gone(entry) or action.cause)
        elif isinstance(action, schedule.Claim):
            self._record(entry, State.CLAIMED)
        elif isinstance(action, schedule.Stop):
            attempt.request_stop(self._attempt_dir(entry), StopReason.STOPPED)
        else:
            self._start(entry, action)

    def _gone(self, entry: schedule.Entry) -> str:
        """What became of the worker that had taken a command; "" when that was this one."""
        record = self.journal.newest.get(entry.number)
        if not entry.inherited or entry.state is State.QUEUED:
            return ""
        if record is None:
            return "an earlier worker, whose records cannot be read, may have run it"
        return self._why_gone(record.worker, entry.run_id)

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
        record = JournalRecord(
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
        if state is State.ENDED:
            self._tidy(entry.run_id)  # before: after it nobody looks there again
        self.journal.add(record)
        log.info("%s", record.told())

    def _tidy(self, run_id: str) -> None:
        """Remove what was being written for a run when who wrote it was killed; nobody is now.

        Of an attempt that was never begun too: the folder is there, and the run ended before.
        """
        for folder in self.run_dir(run_id).glob("attempt-*"):
            remove_leftovers(folder)

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
        except UsageError as error:  # nothing that could be run, however often it is tried
            self._end(entry, Result.FAILED_TO_SPAWN, str(error))
            return
        except (OSError, UserError) as error:
            self.problems[entry.run_id] = f"{entry.run_id} cannot be started: {error}"
            return
        self._record(
            entry,
            State.STARTED,
            attempts=number,
            snapshot=action.payload,
            cause=self._why_again(entry),
        )
        self._spawn(entry.run_id, folder)

    def _why_again(self, entry: schedule.Entry) -> str:
        """Why the last attempt ended; so every attempt's end is on record, not the last one's."""
        if not entry.attempts:
            return ""
        failed = self._failed_as(entry.number, entry.attempts)
        why = failed.cause if failed else self._gone(entry)
        return f"attempt {entry.attempts}: {why}" if why else ""

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
        make_dirs(run_dir, mode=0o700)
        for folder in (environment.checkpoint_dir, environment.artifact_dir):
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
                gpu=stage.gpu,
                fence=str(self.layout.fence),
                cut_off=self._gone(entry) if entry.attempts else "",
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
        except DataError as error:  # of this run alone: the others go on
            self.problems[message.run_id] = str(error)
            return True
        if isinstance(seen, attempt.Running | attempt.Ended):
            self.problems.pop(message.run_id, None)
        if isinstance(seen, attempt.Running):
            return True
        if isinstance(seen, attempt.Ended):
            self._ended(message, record, seen.record)
            return False
        if self._giving_way and not attempt.was_started(seen):
            return False
        if not isinstance(seen, attempt.NeverStarted):
            log.warning("%s lost its supervisor", message.run_id)
            if self._is_to_be_stopped(message.number):
                # Before it is taken over, or it would end as killed, and not as stopped.
                attempt.request_stop(folder, StopReason.STOPPED)
        self._spawn(message.run_id, folder)
        return True

    def _is_to_be_stopped(self, number: int) -> bool:
        """Whether a stop: line that reaches a run has not ended yet."""
        _, run = self._commands[number]
        return isinstance(run, RunCommand) and any(
            isinstance(stop, StopCommand)
            and stop.stage == run.stage
            and later > number
            and later not in self._over
            for later, (_, stop) in self._commands.items()
        )

    def _ended(self, message: QueuedCommand, record: JournalRecord, ended: ExitRecord) -> None:
        """Record an attempt's end as the command's, unless another attempt follows."""
        if self.layout.fence.exists():
            # How it goes on is for the worker that has taken over, which may still hear of what
            # this one records: it would take a stage that was ended by the fence for a run's end.
            return
        entry = schedule.Entry(
            number=message.number,
            line=message.line,
            run_id=message.run_id,
            command=self._commands[message.number][1],
            snapshot=record.snapshot,
            attempts=record.attempt,
        )
        if ended.result in _RETRIED and self._is_tried_again(entry, ended):
            if self._failed_as(entry.number, ended.attempt) is None:
                again = time.monotonic() + schedule.backoff(entry.attempts)
                self._failed[entry.number] = (ended, again)
            return
        if ended.result in _RETRIED and entry.attempts > 1:
            cause = f"gave up after {entry.attempts} attempts; the last: {ended.cause}"
            ended = dataclasses.replace(ended, cause=cause)
        self._keep_result(entry, ended.result, ended.cause, ended)
        self._record(
            entry, State.ENDED, attempts=entry.attempts, snapshot=entry.snapshot, ended=ended
        )

    def _is_tried_again(self, entry: schedule.Entry, ended: ExitRecord) -> bool:
        """Whether another attempt follows one that did not succeed. `sh:` is tried once."""
        if not isinstance(entry.command, RunCommand):
            return False
        payload = self._ready_payloads().get(entry.snapshot)
        stage = payload.stages.get(entry.stage) if payload else None
        return stage is not None and (ended.interrupted or self._failures(entry) <= stage.retries)

    def _failures(self, entry: schedule.Entry) -> int:
        """How many attempts of a run on this machine have ended by themselves."""
        run_dir = self.run_dir(entry.run_id)
        folders = [attempt.attempt_dir(run_dir, n) for n in range(1, entry.attempts + 1)]
        return sum(_has_failed(folder) for folder in folders)

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
        for entry in self.entries:
            # A supervisor that is just being started and misses a file of its own starts nothing.
            if entry.state is not State.ENDED and not entry.alive:
                self._tidy(entry.run_id)
        return not alive


def _has_failed(folder: Path) -> bool:
    """Whether an attempt that did not succeed has ended by itself."""
    try:
        record = read_file(folder / EXIT, ExitRecord)
    except DataError:
        return True  # damaged: then it is not known to have been its machine
    return record is not None and not record.interrupted
