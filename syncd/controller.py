"""The controller's daemon: turns new lines of `queue.txt` and changes of `serve/` into objects,
and what the worker sends into the files of `in/`.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from protocol.errors import ConfigError, DataError, UserError
from protocol.files import read_regular
from protocol.journal import JournalRecord
from protocol.messages import (
    Append,
    BridgeUrl,
    CheckpointsGrouped,
    Content,
    DropFile,
    Journal,
    Message,
    PutFile,
    QueuedCommand,
    RunEnded,
    Snapshot,
    StatusReport,
)
from protocol.names import SHELL_STAGE, RunId, safe_relative, suggest
from protocol.publish import make_dirs, publish_bytes, publish_json
from protocol.queue import (
    MAX_QUEUE_BYTES,
    QueueLine,
    RunCommand,
    ShellCommand,
    identity,
)
from protocol.schema import decode
from protocol.status import Status, render_status
from protocol.wire import Role, Writer
from syncd.bridge import current_url, url_file
from syncd.daemon import BRIDGE_URL, RESCAN_SECONDS, Daemon, Loop
from syncd.delivery.files import checked_path, is_growing
from syncd.delivery.joins import Joins
from syncd.delivery.payload import ServedFolder, read_stages
from syncd.delivery.receipt import check
from syncd.delivery.received import RemoteFiles
from syncd.delivery.stored import StoredChunks
from syncd.queue_scan import QueueScan
from syncd.rclone.errors import shown
from syncd.rclone.profiles import LOCAL
from syncd.rclone.remote import NotFound
from syncd.records import JournalFile, ResultsFile
from syncd.stages import schedule
from syncd.unsent import UnsentFile

log = logging.getLogger("syncd")

STATUS_SECONDS = 15.0
TICK_SECONDS = 5.0
DEBOUNCE_SECONDS = 0.2
SERVE_SCAN_SECONDS = 10.0
PLAIN_QUEUE = "queue.txt"
PLAIN_SECONDS = 10.0
ROTATING = (
    "the key is being rotated: give the worker a copy of .syncd/key "
    "(`syncd init --rotate --key-file COPY` there), and restart each `syncd watch` that was "
    "started with the old one"
)
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
        self.contents.progressed = self.push_loop.wake.set
        self.served = ServedFolder(self.state, root, self.contents)
        self.joins = Joins(self.state, root)
        self.files = RemoteFiles(self.state, root, self.contents, wanted=_is_wanted)
        self.stored = StoredChunks(self.state)
        self.journal = JournalFile(self.state, self.layout.journal, copy=True)
        self.results = ResultsFile(self.state, self.layout.results)
        self.serve_loop = Loop("serve", self._scan_serve, lambda: SERVE_SCAN_SECONDS)
        self.queue = QueueScan(self.state, "queue")
        self.plain_queue = QueueScan(self.state, "plain queue")
        self.plain_loop = Loop("plain queue", self._scan_plain_queue, lambda: PLAIN_SECONDS)
        self._status_written = 0.0
        self._told: list[str] | None = None
        self._unwritten: dict[str, str] = {}
        self._unsent = UnsentFile(self.layout.unsent)
        self._worker_runs = bool(self.state.get("status", {}).get("running"))

    def recovered(self) -> None:
        self._show_records()
        if not self.queue.has_begun():
            self._begin()

    def _begin(self) -> None:
        """Go on where an earlier controller left off, if there was one.

        Raises DataError when what it sent is not to be had: numbers would be given twice.
        """
        if unread := self.link.peers.unread():
            raise DataError(
                "number commands",
                path=shown(self.settings.remote),
                why=f"what {unread[-1]} sent, and a worker has read, is not there any more",
                hint="Restore .syncd/ or the remote's files; or make both ends anew, on another "
                "folder of the remote.",
            )
        rows = self.state.rows("SELECT message FROM commands")
        known = [decode(QueuedCommand, json.loads(text)) for (text,) in rows]
        with self.state.transaction():
            for found, unsealed in ((self.queue, False), (self.plain_queue, True)):
                lines = (identity(each.line) for each in known if each.unsealed is unsealed)
                found.begin(dict(Counter(lines)))

    def watched(self) -> list[tuple[Path, Loop]]:
        return [
            (self.layout.queue, self.main_loop),
            (self.layout.serve, self.serve_loop),
            (url_file(self.layout), self.push_loop),
        ]

    def more_loops(self) -> list[Loop]:
        return [self.serve_loop, *([self.plain_loop] if self.settings.unsealed_lines else [])]

    # Loops

    def tick(self) -> None:
        if self.fenced:
            self.stop()
            return
        try:
            if self._take_lines(self.queue, self._read_queue()):
                self._served()
            self._write_status()
            self._write_unsent()
            self._show_records()
        finally:
            self._write_problems()  # which tell why rounds fail

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
        self.joins.retry()
        if self.served.pending():
            self.served.upload()
            self.push_loop.wake.set()
        self.contents.fetch_early()
        if self.files.missing():
            self.files.fetch()
        if self.stored.look(self._anchored()):
            self.push_loop.wake.set()
        self.link.compact()

    def _anchored(self) -> Path | None:
        """The folder of the remote that outlives the others, where it is on this disk."""
        anchor = self.remote.anchor()
        # Asked of no other kind, which may not be reached now, and is not needed for what else
        # there is to be done.
        return anchor.local_path() if anchor.profile() is LOCAL else None

    def is_busy(self) -> bool:
        return self._worker_runs

    def bulk_interval(self) -> float:
        # What there is to be done comes with a wake; what has failed is tried again now and then.
        return super().bulk_interval() if self.is_busy() else RESCAN_SECONDS

    def tick_interval(self) -> float:
        return super().tick_interval() if self.queue.is_settling() else TICK_SECONDS

    def leave(self) -> None:
        return

    # The queue

    def _take_lines(self, found: QueueScan, data: bytes, *, unsealed: bool = False) -> bool:
        """Number the new lines of a queue; return whether there were any."""
        decision = found.look(data)
        if decision is None:
            return False
        # Looked at once for all of them, and before the transaction: the thread that scans serve/
        # locks it first and the state then, so the other way round both would wait for ever.
        payload = self._payload() if any(_is_run(line) for line in decision.new) else NO_PAYLOAD
        with self.state.transaction():
            for line in decision.new:
                self._number(line, payload, unsealed=unsealed)
            found.keep(decision)
        found.done(decision)
        return bool(decision.new)

    def _scan_plain_queue(self) -> None:
        """Take the lines that someone without a key has written in the remote's root.

        A remote that does not show the file now says nothing of its lines.
        """
        try:
            data = self.remote.read(PLAIN_QUEUE, limit=MAX_QUEUE_BYTES)
        except NotFound:
            return
        if self._take_lines(self.plain_queue, data, unsealed=True):
            self._served()

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
            return read_regular(path)
        except FileNotFoundError:
            return b""
        except OSError as error:
            raise ConfigError("read the queue", path=path, why=str(error)) from error

    def _number(self, line: QueueLine, payload: schedule.Payload, *, unsealed: bool) -> None:
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
            unsealed=unsealed,
        )
        self.state.run("INSERT INTO commands VALUES (?, ?)", number, json.dumps(asdict(message)))
        (log.warning if error else log.info)(
            "%squeue line %d is command %d: %s%s",
            "unsealed " if unsealed else "",
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
        messages: list[Message] = [*self._bridge_url(), *self._new_commands(seq, budget)]
        messages += self.stored.collect()
        budget -= sum(len(m.line) for m in messages if isinstance(m, QueuedCommand))
        return messages + (self.served.collect(budget) if budget > 0 else [])

    def _bridge_url(self) -> list[BridgeUrl]:
        """Where the bridge is to be reached, if that has changed."""
        url = current_url(self.layout)
        if url is None or url == self.state.get(BRIDGE_URL):
            return []
        self.state.put(BRIDGE_URL, url)
        return [BridgeUrl(url=url)]

    def pack_up(self, acked: int) -> None:
        self.served.pack_up(self._snapshots_in_use())
        self.stored.pack_up(self._anchored())

    def _snapshots_in_use(self) -> set[int]:
        """Snapshots that a run has been given; or may have been, which was not heard of yet."""
        records = self.journal.newest
        queued = (m for m in self._commands_after(0, sys.maxsize) if m.number not in records)
        oldest = min((m.snapshot for m in queued if m.snapshot), default=sys.maxsize)
        return self.journal.payloads_in_use() | {o for o in self.served.sent() if o >= oldest}

    def restate(self) -> Iterator[Message]:
        if url := self.state.get(BRIDGE_URL):
            yield BridgeUrl(url=url)
        yield from self.stored.restate()
        yield from self.served.restate()
        yield from self._commands_after(0, sys.maxsize)

    def unacked(self, acked: int) -> int:
        return 0

    def kept_objects(self) -> set[str]:
        return self.contents.objects()

    def make_again(self, lost: set[str]) -> None:
        if self.contents.lose(lost):
            self.served.send_again()

    def _new_commands(self, seq: int, budget: int) -> list[QueuedCommand]:
        found = self._commands_after(int(self.state.get("commands_sent", 0)), budget)
        if found:
            self.state.put("commands_sent", found[-1].number)
            on_their_way = [each for each in self._on_their_way() if each[0] < seq]
            self.state.put("commands in packs", [*on_their_way, [seq, len(found)]])
        return found

    def _on_their_way(self) -> list[list[int]]:
        """Packs that are not on the remote yet, each with how many commands it brings."""
        sent = self.link.progress()[0]
        return [each for each in self.state.get("commands in packs", []) if each[0] > sent]

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
        check(message)
        if writer.role is Role.CONTROLLER:
            self._inherit(message)
        elif isinstance(message, Append):
            self._join(message)
        elif isinstance(message, Journal):
            self._journal(message.record)
        elif isinstance(message, RunEnded):
            if self.results.add(message.record):
                self._show_records()  # before its end is in the journal
        elif isinstance(message, Content | PutFile | CheckpointsGrouped | DropFile):
            self.files.apply(message)
            if isinstance(message, Content):
                self.stored.expect(message)
        elif isinstance(message, StatusReport):
            self._keep_status(message)

    def restart(self, writer: Writer, messages: Sequence[Message]) -> None:
        if writer.role is Role.WORKER:
            self.files.restart(messages)

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
            log.info("%s", record.told())

    # Status

    def _write_problems(self) -> None:
        """Say what is wrong at this end, where `syncd status` finds it, when that has changed."""
        found = [*dict.fromkeys(self.problems.values()), *self.refusals()]
        if self.link.keys.previous is not None:
            found.append(ROTATING)
        parts = (self.joins.problems, self.files.problems, self.served.problems, self._unwritten)
        for kept in parts:
            found += [f"{path}: {why}" for path, why in kept.items()]
        if found != self._told:
            publish_json(self.layout.problems, found, mode=0o600)
            self._told = found

    def _show_records(self) -> None:
        """Write what the worker has recorded. What cannot be written now is, once it can be."""
        self.journal.catch_up()
        why = ""
        try:
            self.results.publish()
        except OSError as error:
            why = f"cannot be written: {error.strerror or error}"
        self._unwritten = {
            path.name: told
            for path, told in (
                (self.layout.journal, self.journal.problem),
                (self.layout.results, why),
            )
            if told
        }

    def _write_unsent(self) -> None:
        """Say what waits here to be sent, where `syncd status` finds it."""
        sent, newest = self.state.get("commands_sent", 0), "SELECT MAX(number) FROM commands"
        row = self.state.row(newest)
        new = int(row[0] or 0) - int(sent) if row else 0

        def measure() -> tuple[int, int]:
            commands = new + sum(count for _, count in self._on_their_way())
            return commands, self.link.unsent() + self.served.unsent()

        waits = new > 0 or self.link.unsent() > 0 or self.served.pending()
        self._unsent.update(waits=waits, progress=self.link.progress(), measure=measure)

    def _keep_status(self, message: StatusReport) -> None:
        self._worker_runs = bool(message.status.get("running"))
        with self.state.transaction():
            self.state.put("status", dict(message.status))
            self.state.put("status came", time.time())
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
        # By this end's clock alone: how long ago it came, whatever the worker's clock says.
        age = max(time.time() - float(self.state.get("status came", 0.0)), 0.0)
        text = render_status(status, now=status.time + age)
        kept = {**kept, "came": time.time() - age}
        publish_bytes(self.layout.status, text.encode("utf-8"))
        publish_bytes(
            self.layout.private / "status.json", json.dumps(kept).encode("utf-8"), mode=0o600
        )
        self._status_written = time.monotonic()
