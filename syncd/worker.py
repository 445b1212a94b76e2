"""The worker's daemon: takes commands, runs them, and sends what comes of it.

What goes out first is what a person waits for: the journal, results, logs and the status; files
come after, and their larger contents travel beside, in the bulk loop.
"""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from protocol.checkpoints import CheckpointIndex
from protocol.errors import RefusedError
from protocol.journal import JournalRecord
from protocol.messages import (
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
    Stored,
)
from protocol.names import RunId
from protocol.publish import make_dirs, publish_json
from protocol.states import State as CommandState
from protocol.wire import Role, Writer
from syncd.courtesy import COURTESY_SECONDS, Courtesy
from syncd.daemon import BRIDGE_URL, RESCAN_SECONDS, Daemon, Loop
from syncd.delivery.checkpoints import Checkpoints
from syncd.delivery.files import LocalFiles
from syncd.delivery.holds import Holds
from syncd.delivery.outgoing import WorkerOutgoing
from syncd.delivery.payload import PayloadStore
from syncd.delivery.peers import FencedError
from syncd.delivery.proofs import READ_BACK, Proofs
from syncd.delivery.receipt import check
from syncd.delivery.received import RemoteFiles
from syncd.delivery.restores import Restores
from syncd.delivery.streams import Tails
from syncd.delivery.unacked import Unacked
from syncd.last_heard import LastHeard
from syncd.leaving import Outlook, Quiet, Reason, Verdict, judge, told_idle, write_left
from syncd.records import JournalFile, ResultsFile
from syncd.stages import schedule
from syncd.stages.attempt_files import read_file
from syncd.stages.runner import Runner
from syncd.worker_status import HEARTBEAT_SECONDS, WorkerStatus

log = logging.getLogger("syncd")

FENCE_PATIENCE_SECONDS = 60.0
IDLE_TICK_SECONDS = 4.0
# How often it is looked whether the other end can see that this one is about to leave.
LEAVING_SECONDS = 1.0
# A main loop that did no round for so long was suspended, with the machine or by a signal.
SUSPENDED_SECONDS = 10.0


@dataclass(frozen=True, kw_only=True)
class Fence:
    """That another worker, `by`, has taken over, and when it was found out."""

    by: str
    time: float


class Worker(Daemon):
    """The daemon at the VM."""

    runner: Runner

    def setup(self) -> None:
        root = self.layout.root
        for folder in (self.layout.artifacts, self.layout.store):
            make_dirs(folder)
        make_dirs(self.layout.runs, mode=0o700)
        self.layout.left.unlink(missing_ok=True)
        self.contents.progressed = self.push_loop.wake.set
        self.courtesy_loop = Loop("courtesy", self._show, lambda: self.every(HEARTBEAT_SECONDS))
        self.local = LocalFiles(self.state, root, self.contents)
        self._set_up_checkpoints()
        self.inherited = RemoteFiles(
            self.state, root, self.contents, wanted=lambda path: True, placed=self._note_read
        )
        self.restores = Restores(
            self.state,
            root,
            self.layout.private / "restored",
            self.contents,
            placed=self._note_read,
        )
        self.payloads = PayloadStore(
            self.state, root, self.layout.private / "payload", self.payload_contents
        )
        self._restored = False
        self._claims: dict[int, int] = {}
        self._ticked = time.monotonic()
        self._awake = True
        self._quiet = Quiet()
        self._verdict = Verdict.BUSY
        self.journal = JournalFile(self.state, self.layout.journal)
        self.results = ResultsFile(self.state, self.layout.results)
        self.last_heard = LastHeard(self.state)
        self.courtesy = Courtesy((self.layout.status, self.layout.results), self.link.scratch)
        self.outgoing = WorkerOutgoing(
            layout=self.layout,
            state=self.state,
            journal=self.journal,
            results=self.results,
            tails=Tails(self.state, root),
            unacked=Unacked(self.state, root),
            local=self.local,
            checkpoints=self.checkpoints,
            contents=self.contents,
            put_chunk=lambda data: self.link.put_chunk(data, compress=True),
        )

    def _set_up_checkpoints(self) -> None:
        held = self.layout.private / "held"
        make_dirs(held, mode=0o700)
        self.checkpoint_loop = Loop("checkpoints", self._prove, self._prove_interval)
        self.proofs = Proofs(
            self.state, lambda: self.remote, self.link.scratch, lambda: self.link.last_heard
        )
        self.checkpoints = Checkpoints(
            state=self.state,
            root=self.layout.root,
            contents=self.contents,
            proofs=self.proofs,
            holds=Holds(held),
            is_over=self._is_over,
            sent=lambda: self.link.progress()[0],
            make_again=self.make_again,
        )
        self._index: CheckpointIndex | None = None  # as it was written last

    def _is_over(self, run_id: str) -> bool:
        """Whether a run has ended, and is not attempted again."""
        with contextlib.suppress(RefusedError):  # a folder there may have any name
            record = self.journal.newest.get(RunId.parse(run_id).number)
            return bool(record and record.run_id == run_id and record.state is CommandState.ENDED)
        return False

    def _note_read(self, sha256: str) -> None:
        """What was restored from chunks was read from them."""
        pieces = self.contents.pieces(sha256)
        self.proofs.note({piece.object for piece in pieces}, READ_BACK)

    def recovered(self) -> None:
        self.results.publish()
        policy = schedule.Policy(
            stages=frozenset(self.settings.stages) or None,
            shell=self.settings.shell,
            unsealed_lines=self.settings.unsealed_lines,
        )
        worker = str(self.link.writer)
        self.status = WorkerStatus(self.layout, worker=worker, sealed=self.sealed)
        self.runner = Runner(
            layout=self.layout,
            database=self.state,
            journal=self.journal,
            results=self.results,
            payloads=self.payloads,
            policy=policy,
            worker=worker,
            is_published=self._is_published,
            doubtful=self._doubtful(),
            why_gone=self.last_heard.cause,
        )
        self._read_fence()
        for record in self.journal.newest.values():
            if record.state is CommandState.STARTED and record.worker == worker:
                log.info("%s was started before: it is looked for", record.run_id)

    def watched(self) -> list[tuple[Path, Loop]]:
        return [
            (self.layout.inbox, self.push_loop),
            (self.layout.runs, self.main_loop),
            (self.layout.store, self.bulk_loop),
            (self.layout.artifacts, self.bulk_loop),
        ]

    def more_loops(self) -> list[Loop]:
        # Where commands come from a plain file there, a person looks there for what became of them.
        courtesy = [self.courtesy_loop] if self.settings.unsealed_lines else []
        return [self.checkpoint_loop, *courtesy]

    # Loops

    def tick(self) -> None:
        if self.fenced:
            self._give_way()
            return
        try:
            if self._may_start():
                self.runner.round()
        finally:
            self._write_status()  # which tells why rounds fail
        if self.outgoing.has_records() or self.status.is_due():
            self.push_loop.wake.set()
            self.courtesy_loop.wake.set()
        if self.runner.plan.actions:
            self.main_loop.wake.set()

    def _show(self) -> None:
        self.courtesy_loop.rest = COURTESY_SECONDS if self.courtesy.publish(self.remote) else 0.0

    def _may_start(self) -> bool:
        """Whether this worker knows enough to start anything."""
        now = time.monotonic()
        if now - self._ticked > SUSPENDED_SECONDS:
            self._awake = False  # it may have been replaced meanwhile
            self.look_for_writers()
        self._ticked = now
        return self._awake and not self._is_recovering()

    def _is_recovering(self) -> bool:
        """Whether files of a predecessor are still to come: nothing is started before.

        Checkpoints are waited for until it is decided which can be had; of other files, what could
        not be had at once may come later.
        """
        others = not self._restored and bool(self.inherited.missing())
        return others or bool(self.restores.missing())

    def _pull(self) -> None:
        try:
            super()._pull()
        finally:
            self._awake = True

    def _doubtful(self) -> int:
        """Up to which command a predecessor may have run some that cannot be read here.

        Settled when this worker began: it had read by then all that there was to be read.
        """
        if self.state.get("doubtful") is None:
            row = self.state.row("SELECT COALESCE(MAX(number), 0) FROM commands")
            self.state.put("doubtful", int(row[0]) if row and self.link.peers.unread() else 0)
        return int(self.state.get("doubtful"))

    def _is_published(self, record: JournalRecord) -> bool:
        """Whether a claim is on the remote, and no successor was when it was looked for then."""
        if not self.outgoing.is_said(record):
            return False
        pack = self._claims.setdefault(record.number, self.link.last_seq())
        if not self.link.confirmed(pack):
            self.look_for_writers()
            return False
        return True

    def tick_interval(self) -> float:
        # With nothing that runs or waits, whatever there is to be done comes with a wake.
        return super().tick_interval() if self.runner.is_busy() else IDLE_TICK_SECONDS

    def fence(self, error: FencedError) -> None:
        """Also for the supervisors: they end their stages, whatever becomes of this daemon."""
        if not self.layout.fence.exists():
            fence = Fence(by=str(error.by), time=time.time())
            publish_json(self.layout.fence, asdict(fence), mode=0o600)
        super().fence(error)

    def _read_fence(self) -> None:
        """A worker that was fenced stays so, also while it cannot reach its remote."""
        fence = read_file(self.layout.fence, Fence)
        by = Writer.parse(fence.by) if fence else None
        if by is not None and by > self.link.writer:
            super().fence(FencedError(self.link.writer, by))
        else:
            # Left by an earlier incarnation in this very folder; supervisors go by its presence.
            self.layout.fence.unlink(missing_ok=True)

    def _give_way(self) -> None:
        deadline = time.monotonic() + FENCE_PATIENCE_SECONDS
        while not self.runner.give_way() and time.monotonic() < deadline:
            time.sleep(0.2)
        self.stop()

    def bulk(self) -> None:
        quiet = self._quiet_for()  # so that what is scanned next was made before
        if self._is_recovering() or self.inherited.missing():
            self.restores.fetch()
            # What comes late takes the place of nothing that was made here meanwhile.
            self.inherited.fetch(sparing=self._restored)
            self._restored = True  # what could not be had is named, and the rest is here
            self.main_loop.wake.set()
        self.payload_contents.fetch_early()
        ready = self.payloads.newest(0)
        self.payloads.unpack(self.journal.payloads_in_use())
        if self.payloads.newest(0) != ready:
            self.main_loop.wake.set()
            self.payloads.prune(self.journal.payloads_in_use())
        if self.outgoing.scan():
            self.push_loop.wake.set()
        if not self.restores.missing():  # else a predecessor's objects are still needed
            self._bring_checkpoints()
        if self.settings.stop_when_idle:
            self._leave_when_idle(min(quiet, self._quiet_for()))

    def _bring_checkpoints(self) -> None:
        if self.outgoing.bring_checkpoints():
            self.push_loop.wake.set()
            self.checkpoint_loop.wake.set()
        # A state says all that this worker stands for, what it inherited included.
        if self.outgoing.covers(self.inherited.paths()):
            self.link.compact()

    def _quiet_for(self) -> float:
        """For how many seconds nothing has run or waited."""
        mark = self.state.row(
            "SELECT (SELECT MAX(number) FROM commands), (SELECT MAX(place) FROM journal)"
        )
        return self._quiet.look(busy=self.runner.is_busy() or self._is_recovering(), mark=mark)

    def _leave_when_idle(self, quiet: float) -> None:
        """End this daemon once it was quiet for long enough, and nothing here is needed any more.

        The status says so first. A command that comes before that was sent calls it off; one that
        comes later stays queued, on the remote and here.
        """
        after, leaving = self.settings.stop_when_idle, self.status.leaving
        if not leaving:
            self._verdict = self._judge(quiet, after)
            leaving = told_idle(after) if self._verdict is Verdict.LEAVE else ""
        elif quiet < after:
            leaving = ""
        elif self.status.has_said_goodbye() and not self.link.unsent():
            log.info("%s", leaving)
            self.stop()
        if leaving != self.status.leaving:
            self.status.leaving = leaving
            self.main_loop.wake.set()

    def _judge(self, quiet: float, after: float) -> Verdict:
        sent = quiet >= after and not (self.outgoing.is_behind() or self.link.unsent())
        durable = sent and self.remote.anchor().profile().durable
        heard = self.link.is_heard()
        kept = sent and (durable or heard) and self.link.is_kept()
        return judge(
            Outlook(quiet=quiet, sent=sent, durable=durable, heard=heard, kept=kept), after
        )

    def bulk_interval(self) -> float:
        if self.status.leaving:
            return LEAVING_SECONDS
        # Files that are written are seen at once, and looked at again until they have settled.
        return super().bulk_interval() if self.outgoing.is_unsettled() else RESCAN_SECONDS

    def _prove(self) -> None:
        """Find out which checkpoints are really on the remote, beside all that is sent."""
        if self.fenced:
            return
        news, more = self.checkpoints.prove()
        if news:
            self.push_loop.wake.set()
            self.bulk_loop.wake.set()
        if more:
            self.checkpoint_loop.wake.set()
        index = self.checkpoints.index()
        if index != self._index and (index.runs or self.layout.checkpoint_index.exists()):
            publish_json(self.layout.checkpoint_index, asdict(index))
            self._index = index

    def _prove_interval(self) -> float:
        return super().bulk_interval() if self.checkpoints.is_waiting() else RESCAN_SECONDS

    def leave(self) -> None:
        self.runner.look()
        alive = [entry.run_id for entry in self.runner.entries if entry.alive]
        kept = f"; {', '.join(alive)} goes on without it" if alive else ""
        if self.fenced:
            reason, why = Reason.FENCED, f"fenced: {self.fenced.why}"
        elif self.status.leaving:
            reason, why = Reason.IDLE, self.status.leaving
        else:
            reason, why = Reason.STOPPED, f"stopped{kept}"
        self.status.leaving = why
        self._write_status()
        write_left(self.layout, reason, why)

    # What arrives

    def apply(self, writer: Writer, message: Message) -> None:
        check(message)
        if writer.role is Role.WORKER:
            self._inherit(writer, message)
        elif isinstance(message, QueuedCommand):
            self.state.run(
                "INSERT OR IGNORE INTO commands VALUES (?, ?)",
                message.number,
                json.dumps(asdict(message)),
            )
        elif isinstance(message, BridgeUrl):
            self.state.put(BRIDGE_URL, message.url)
            self.use_bridge_at(message.url)
        elif isinstance(message, Content | Snapshot):
            # Before the link is open there is no runner, but the journal is already there.
            self.payloads.apply(message, self.journal.payloads_in_use())
        elif isinstance(message, Stored):
            self.proofs.note(message.objects, "the controller's word")
            self.checkpoint_loop.wake.set()

    def restart(self, writer: Writer, messages: Sequence[Message]) -> None:
        if writer.role is Role.WORKER:
            self.inherited.restart(messages)

    def _inherit(self, writer: Writer, message: Message) -> None:
        """Take over what a predecessor on another disk had come to."""
        if isinstance(message, Journal):
            self.journal.add(message.record)
        elif isinstance(message, RunEnded):
            self.results.add(message.record)
        elif isinstance(message, Content | PutFile | CheckpointsGrouped | DropFile):
            self.inherited.apply(message)
        elif isinstance(message, StatusReport):
            self.last_heard.note(writer, message.status)

    # What goes out

    def collect(self, seq: int, budget: int) -> list[Message]:
        # How far bars have come goes along with the status, which tells it too.
        messages = self.outgoing.collect(seq, budget, redraws=self.status.is_due())
        messages += self.status.collect(along=bool(messages))
        if self.outgoing.held():
            self.bulk_loop.wake.set()  # what they wait for is a scan of the files
        return messages

    def pack_up(self, acked: int) -> None:
        self.outgoing.pack_up(acked)

    def restate(self) -> list[Message]:
        return [*self.outgoing.restate(), *self.status.restate()]

    def unacked(self, acked: int) -> int:
        return self.outgoing.unacked(acked)

    def kept_objects(self) -> set[str]:
        return self.outgoing.kept_objects()

    def is_busy(self) -> bool:
        return self.runner.is_running()

    def make_again(self, lost: set[str]) -> None:
        self.outgoing.make_again(lost)

    def _write_status(self) -> None:
        self.status.heartbeat = self.every(HEARTBEAT_SECONDS)
        unsent = self.link.unsent() + self.outgoing.unsent()
        self.status.update(
            self.runner,
            unsent=unsent,
            progress=self.link.progress(),
            checkpoints=self.checkpoints,
            inherited=self.restores.restored,
            problems=self._all_problems(),
        )

    def _all_problems(self) -> list[str]:
        loops = dict.fromkeys(self.problems.values())  # of two that meet the same, one tells
        found = [*loops, *self.runner.problems.values(), *self.refusals()]
        for kept in (self.outgoing.problems(), self.inherited.problems, self.restores.problems):
            found += [f"{path}: {why}" for path, why in kept.items()]
        if self._verdict not in (Verdict.LEAVE, Verdict.BUSY):
            found.append(f"there is nothing to do, and it stays: {self._verdict}")
        if self._is_recovering():
            missing = len(self.inherited.missing() + self.restores.missing())
            why = f" ({self.restores.waits})" if self.restores.waits else ""
            told = f"restoring {missing} files of an earlier worker{why}; nothing starts before"
            found.append(told)
        return found + ([self.payloads.problem] if self.payloads.problem else [])
