"""What a message must be before anything is done with what it says.

A valid seal says who wrote a message, not that it is well meant: run ids become names of files,
and what is kept is used again at every start. Paths are checked where they are placed
(`syncd/delivery/files.py`, `streams.py`, `payload.py`).
"""

from __future__ import annotations

from protocol.errors import RefusedError, UserError
from protocol.journal import JournalRecord
from protocol.messages import (
    Journal,
    Message,
    QueuedCommand,
    RunEnded,
    Snapshot,
    StatusReport,
    Stored,
)
from protocol.names import SHELL_STAGE, RunId
from protocol.queue import RunCommand, ShellCommand, parse_command
from protocol.results import RunRecord
from protocol.schema import decode
from protocol.snapshots import decode_snapshot
from protocol.status import Status
from protocol.wire import Role, Writer
from syncd.delivery.chunks import parse


def check(message: Message) -> None:
    """Raise RefusedError, naming what it is about, for a message that must not be kept."""
    if isinstance(message, QueuedCommand):
        _check_command(message)
    elif isinstance(message, Journal):
        _check_record(message.record)
    elif isinstance(message, RunEnded):
        _check_run(message.record)
    elif isinstance(message, Snapshot):
        decode_snapshot(message)
    elif isinstance(message, Stored):
        for path in message.objects:
            parse(path)
    elif isinstance(message, StatusReport):
        try:
            decode(Status, message.status)
        except ValueError as error:
            raise RefusedError("read a status", why=str(error)) from error


def _check_command(message: QueuedCommand) -> None:
    try:
        command = parse_command(message.line)
    except UserError:
        command = None  # it ends as refused
    stage = ""
    if isinstance(command, RunCommand):
        stage = command.stage
    elif isinstance(command, ShellCommand):
        stage = SHELL_STAGE
    if not message.run_id and (message.error or not stage):
        return
    _check_run_id(f"command {message.number}", message.run_id, stage, message.number)


def _check_record(record: JournalRecord) -> None:
    what = f"journal record of command {record.number}"
    worker = Writer.parse(record.worker)
    if worker is None or worker.role is not Role.WORKER:
        raise RefusedError(what, why=f"{record.worker[:80]!r} is no worker")
    if record.run_id:
        _check_run_id(what, record.run_id, None, record.number)


def _check_run(record: RunRecord) -> None:
    _check_run_id(f"result of {record.run_id[:80]!r}", record.run_id, record.stage, None)


def _check_run_id(what: str, text: str, stage: str | None, number: int | None) -> None:
    run = RunId.parse(text)
    fits = stage in (None, run.stage) and number in (None, run.number) and not run.arm
    if not fits or str(run) != text:
        raise RefusedError(what, why=f"the run id {text!r} is not its own")
