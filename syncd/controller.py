"""The controller's daemon: turns new lines of `queue.txt` and changes of `serve/` into objects,
and what the worker sends into the files of `in/`.
"""

from __future__ import annotations

import hashlib
import json
import logging
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from protocol.errors import ConfigError, DataError, UserError
from protocol.journal import JournalRecord
from protocol.messages import (
    Append,
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
from protocol.names import SHELL_STAGE, RunId, safe_relative, suggest
from protocol.publish import make_dirs, publish_bytes
from protocol.queue import (
    MAX_QUEUE_BYTES,
    QueueLine,
    RunCommand,
    ShellCommand,
    identity,
    parse_queue,
    scan,
)
from protocol.schema import decode
from protocol.status import Status, render_status
from protocol.wire import Role, Writer
from syncd.daemon import Daemon, Loop
from syncd.delivery.files import RemoteFiles, checked_path, is_growing
from syncd.delivery.payload import ServedFolder, read_stages
from syncd.delivery.streams import Joins
from syncd.records import JournalFile, ResultsFile
from syncd.stages import schedule

log = logging.getLogger("syncd")

STATUS_SECONDS = 15.0
DEBOUNCE_SECONDS = 0.2
SERVE_SCAN_SECONDS = 10.0
NO_PAYLOAD = schedule.Payload(0)


def _is_wanted(path: str) -> bool:
    """Whether a file is placed here: not those of the store, and growing ones come as streams."""
    return path.startswith("in/") and not is_growing(path)


def _is_run(line: QueueLine) -> bool:
    return isinstance(line.command, RunCommand)


def _why_not(command: RunCommand, payload: schedule.Payload) -> str:
    """Return why a command cannot be run with a payload, or ""."""
    if payload.error or command.stage in payload.stages:
        return payload.error
    why = f"serve/stages.toml defines no stage {command.stage!r}. "
    return why + suggest(command.stage, payload.stages)


class Controller(Daemon):
    """The daemon at the laptop."""

    def setup(self) -> None:
        root = self.layout.root
        make_dirs(self.layout.serve)
        self.served = ServedFolder(self.state, root, self.contents)
        self.joins = Joins(self.state, root)
        self.files = RemoteFiles(self.state, root, self.contents, wanted=_is_wanted)
        self.journal = JournalFile(self.state, self.layout.journal)
        self.results = ResultsFile(self.state, self.layout.results)
        self.serve_loop = Loop("serve", self._scan_serve, lambda: SERVE_SCAN_SECONDS)
        self._digest = b""
        self._unchanged_since = time.monotonic()
        self._counted = False  # whether all that the file says was numbered
        self._status_written = 0.0

    def recovered(self) -> None:
        self.results.publish()
        if self.state.get("queue") is None:
            # A controller without a memory: lines that an earlier one numbered are not new.
            rows = self.state.rows("SELECT message FROM commands")
            lines = (decode(QueuedCommand, json.loads(text)).line for (text,) in rows)
            self.state.put("queue", dict(Counter(identity(line) for line in lines)))

    def watched(self) -> list[tuple[Path, Loop]]:
        return [(self.layout.queue, self.main_loop), (self.layout.serve, self.serve_loop)]

    def more_loops(self) -> list[Loop]:
        return [self.serve_loop]

    # Loops

    def tick(self) -> None:
        if self.fenced:
            self.stop()
            return
        if self._scan_queue():
            self._served()
        self._write_status()

    def _scan_serve(self) -> None:
        """Note changes of serve/ that no command has asked for yet."""
        time.sleep(DEBOUNCE_SECONDS)  # an editor that saves does so in several steps
        self.served.scan()
        if self.served.pending():
            self._served()

    def _served(self) -> None:
        self.push_loop.wake.set()
        self.bulk_loop.wake.set()

    def bulk(self) -> None:
        if self.served.pending():
            self.served.upload()
            self.push_loop.wake.set()
        if self.files.missing():
            self.files.fetch()
        self.link.compact()

    def leave(self) -> None:
        return

    # The queue

    def _scan_queue(self) -> bool:
        """Number the new lines of the queue; return whether there were any."""
        data = self._read_queue()
        digest = hashlib.sha256(data).digest()
        now = time.monotonic()
        if digest != self._digest:
            self._digest, self._unchanged_since = digest, now
            self._counted = False
        elif self._counted:
            return False
        last = self.state.get("queue", {})
        decision = scan(last, parse_queue(data), unchanged_for=now - self._unchanged_since)
        if not decision.new and decision.counts == last:
            self._counted = not decision.settling
            return False
        # Looked at once for all of them, and before the transaction: the thread that scans serve/
        # locks it first and the state then, so the other way round both would wait for ever.
        payload = self._payload() if any(_is_run(line) for line in decision.new) else NO_PAYLOAD
        with self.state.transaction():
            for line in decision.new:
                self._number(line, payload)
            self.state.put("queue", dict(decision.counts))
        # Only now: a scan that failed is tried again though the file stays as it is.
        self._counted = not decision.settling
        return bool(decision.new)

    def _read_queue(self) -> bytes:
        path = self.layout.queue
        try:
            if path.stat().st_size > MAX_QUEUE_BYTES:
                raise ConfigError(
                    "read the queue",
                    path=path,
                    why=f"larger than {MAX_QUEUE_BYTES} bytes",
                    hint="Take out lines that have run; they are not run again.",
                )
            return path.read_bytes()
        except FileNotFoundError:
            return b""
        except OSError as error:
            raise ConfigError("read the queue", path=path, why=str(error)) from error

    def _number(self, line: QueueLine, payload: schedule.Payload) -> None:
        """Give a new line its number, with the payload that it must not run without."""
        row = self.state.row("SELECT COALESCE(MAX(number), 0) + 1 FROM commands")
        number = int(row[0]) if row else 1
        order, error = 0, line.error
        if isinstance(line.command, RunCommand):
            error = _why_not(line.command, payload)
            order = 0 if error else payload.order
        message = QueuedCommand(
            number=number,
            line=line.text,
            run_id=self._run_id(number, line),
            snapshot=order,
            error=error,
        )
        self.state.run("INSERT INTO commands VALUES (?, ?)", number, json.dumps(asdict(message)))
        (log.warning if error else log.info)(
            "queue line %d is command %d: %s%s",
            line.number,
            number,
            line.text[:60],
            f": refused: {error}" if error else "",
        )

    def _payload(self) -> schedule.Payload:
        """Return serve/ as it is now, or why nothing can be run with it."""
        try:
            order = self.served.scan()
            return schedule.Payload(order, read_stages(self.layout.serve))
        except UserError as problem:
            return schedule.Payload(0, error=str(problem))

    def _run_id(self, number: int, line: QueueLine) -> str:
        origin = self.link.writer.nonce[:4]
        if isinstance(line.command, RunCommand):
            return str(RunId(stage=line.command.stage, number=number, origin=origin))
        if isinstance(line.command, ShellCommand):
            return str(RunId(stage=SHELL_STAGE, number=number, origin=origin))
        return ""

    # What goes out

    def collect(self, seq: int, budget: int) -> list[Message]:
        messages: list[Message] = [*self._new_grant(), *self._new_commands(budget)]
        budget -= sum(len(m.line) for m in messages if isinstance(m, QueuedCommand))
        return messages + (self.served.collect(budget) if budget > 0 else [])

    def pack_up(self, acked: int) -> None:
        self.served.pack_up(self.journal.payloads_in_use())

    def restate(self) -> list[Message]:
        granted = self.state.get("granted")
        grants = [Grant(writer=granted)] if granted else []
        return [*grants, *self.served.restate(), *self._commands_after(0, sys.maxsize)]

    def kept_objects(self) -> set[str]:
        return self.contents.objects()

    def _new_grant(self) -> list[Message]:
        peer = self.link.peer()
        if peer is None or self.state.get("granted") == str(peer):
            return []
        self.state.put("granted", str(peer))
        return [Grant(writer=str(peer))]

    def _new_commands(self, budget: int) -> list[QueuedCommand]:
        found = self._commands_after(int(self.state.get("commands_sent", 0)), budget)
        if found:
            self.state.put("commands_sent", found[-1].number)
        return found

    def _commands_after(self, number: int, budget: int) -> list[QueuedCommand]:
        found: list[QueuedCommand] = []
        for (text,) in self.state.rows(
            "SELECT message FROM commands WHERE number > ? ORDER BY number", number
        ):
            budget -= len(text)
            if found and budget < 0:
                break
            found.append(decode(QueuedCommand, json.loads(text)))
        return found

    # What arrives

    def apply(self, writer: Writer, message: Message) -> None:
        if writer.role is Role.CONTROLLER:
            self._inherit(message)
        elif isinstance(message, Append):
            self._join(message)
        elif isinstance(message, Journal):
            self._journal(message.record)
        elif isinstance(message, RunEnded):
            if self.results.add(message.record):
                self.results.publish()
        elif isinstance(message, Content | PutFile | DropFile):
            self.files.apply(message)
        elif isinstance(message, StatusReport):
            self._keep_status(message)

    def restart(self, writer: Writer, messages: Sequence[Message]) -> None:
        if writer.role is Role.WORKER:
            self.files.keep_only({m.path for m in messages if isinstance(m, PutFile)})

    def _inherit(self, message: Message) -> None:
        """Go on counting where a controller left off whose state is gone."""
        if isinstance(message, QueuedCommand):
            self.state.run(
                "INSERT OR IGNORE INTO commands VALUES (?, ?)",
                message.number,
                json.dumps(asdict(message)),
            )
        elif isinstance(message, Snapshot):
            self.state.run(
                "INSERT OR IGNORE INTO snapshots VALUES (?, ?, ?, 2)",
                message.order,
                message.id,
                message.blob,
            )

    def _join(self, message: Append) -> None:
        name = message.path.removeprefix("in/")
        log_file = message.path.startswith("in/") and "/" not in name and name.endswith(".log")
        if log_file:
            safe_relative(message.path)
        elif not is_growing(checked_path(message.path)):
            return
        if message.path.startswith("in/"):
            self.joins.apply(message)

    def _journal(self, record: JournalRecord) -> None:
        if self.journal.add(record):
            told = f" as {record.result}" if record.result else ""
            why = f": {record.cause}" if record.cause else ""
            log.info("%s %s%s%s", record.line[:60], record.state, told, why)

    # Status

    def _keep_status(self, message: StatusReport) -> None:
        self.state.put("status", dict(message.status))
        self._status_written = 0.0

    def _write_status(self) -> None:
        """Write status.txt when news came, and now and then, since it tells how old they are."""
        kept = self.state.get("status")
        if kept is None or time.monotonic() - self._status_written < STATUS_SECONDS:
            return
        try:
            status = decode(Status, kept)
        except ValueError as error:
            raise DataError("read the worker's status", why=str(error)) from error
        text = render_status(status, now=time.time())
        publish_bytes(self.layout.status, text.encode("utf-8"))
        publish_bytes(
            self.layout.private / "status.json", json.dumps(kept).encode("utf-8"), mode=0o600
        )
        self._status_written = time.monotonic()
