"""What the worker says, and in which order.

Logs first, then results and the journal, then the status, then files. Two rules of order:

- A record is said after the log that it ends, so whoever reads that a run has ended finds its log
  whole.
- That a run has ended is said after its artefacts are on the remote and announced: a worker that
  takes over later finds what the runs that "ended" have made. Other records pass those that wait.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Collection, Sequence

from protocol.journal import JournalRecord
from protocol.messages import Append, Journal, Message, RunEnded
from protocol.names import shell_number
from protocol.paths import Layout
from protocol.states import State as CommandState
from syncd.delivery.checkpoints import Checkpoints
from syncd.delivery.contents import Contents
from syncd.delivery.files import LocalFiles
from syncd.delivery.streams import Tails
from syncd.delivery.unacked import Unacked
from syncd.holes import held
from syncd.log_parts import LOG_BUDGET, is_log
from syncd.records import JournalFile, ResultsFile
from syncd.state import State

CHAMPION = "store/champion/"
# Logs of scripts that have ended are looked at again so often.
OLD_LOGS_SECONDS = 10.0


class WorkerOutgoing:
    """Collects messages from the worker's parts; its cursors are in the state."""

    def __init__(
        self,
        *,
        layout: Layout,
        state: State,
        journal: JournalFile,
        results: ResultsFile,
        tails: Tails,
        unacked: Unacked,
        local: LocalFiles,
        checkpoints: Checkpoints,
        contents: Contents,
        put_chunk: Callable[[bytes], str],
    ) -> None:
        self._layout = layout
        self._state = state
        self._journal = journal
        self._results = results
        self._tails = tails
        self._unacked = unacked
        self._local = local
        self._checkpoints = checkpoints
        self._contents = contents
        self._put_chunk = put_chunk
        self._scans = (0, 0)
        self._lock = threading.Lock()
        # For each run that has ended: the scan of files that must be over before it is said.
        self._after_scan: dict[str, int] = {}
        # For each such end, by its place: its log, and how many of its bytes must be sent before.
        self._owed: dict[int, tuple[str, int]] = {}
        # Logs of scripts of which all was said, and when they were last looked at.
        self._old_logs: set[str] = set()
        self._looked = -math.inf
        self._too_large: dict[str, str] = {}

    def scan(self) -> bool:
        """Look for changed files and bring them to the remote; return whether there is news."""
        with self._lock:
            self._scans = (self._scans[0] + 1, self._scans[1])
        news = self._local.scan(self._is_over)
        with self._lock:
            self._scans = (self._scans[0], self._scans[0])
        return news or bool(self.held())

    def bring_checkpoints(self) -> bool:
        """Bring new checkpoints to the remote; return whether there is news."""
        return self._checkpoints.bring()

    def is_unsettled(self) -> bool:
        """Whether files that have just changed wait to be looked at again."""
        return self._local.unsettled or self._checkpoints.unsettled

    def covers(self, paths: Collection[str]) -> bool:
        """Whether each of these files has been said by this end, or is gone from it."""
        said = self._local.said() | self._checkpoints.said()
        return all(path in said or not (self._layout.root / path).exists() for path in paths)

    def _is_over(self, path: str) -> bool:
        """Whether the run that a file belongs to has ended, so that the file is final."""
        parts = path.split("/")
        return len(parts) > 3 and parts[:2] == ["in", "artifacts"] and parts[2] in self._after_scan

    def collect(self, seq: int, budget: int, *, redraws: bool) -> list[Message]:
        """Return what is new, as `link.Outgoing` asks for; without the status.

        Lines of logs that have not ended yet are given with `redraws` only, unless their run ends.
        """
        candidates = self._candidates(budget)
        messages: list[Message] = []
        # Those with the least to send first, each no more than its share of what is left: a log
        # that floods keeps no other one waiting, nor the files.
        growing = {path: self._tails.is_settled(path) for path in self.growing()}
        self._old_logs |= {
            path for path, settled in growing.items() if settled and self._is_old(path)
        }
        moved = [path for path, settled in growing.items() if not settled]
        paths = sorted(moved, key=self._tails.behind)
        ending = {path for path, _ in self._owed.values()}
        for place, path in enumerate(paths):
            share = budget // (len(paths) - place + 1)
            appends = self._tails.collect(
                path, share, terminal=is_log(path), final=redraws or path in ending
            )
            self._unacked.note(seq, appends)
            messages += appends
            budget -= sum(len(message.blob) for message in appends)
        self._count_down(messages)
        messages += self._local.collect(budget)
        messages += self._checkpoints.collect(seq, budget)
        return [*messages, *self._ready(candidates)]

    def growing(self) -> list[str]:
        """Paths of growing files, logs first."""
        return self._log_paths() + self._local.growing

    def _log_paths(self) -> list[str]:
        now = time.monotonic()
        if now - self._looked > OLD_LOGS_SECONDS:
            self._looked = now
            self._old_logs = set()
        with os.scandir(self._layout.inbox) as entries:
            found = [f"in/{entry.name}" for entry in entries if entry.name.endswith(".log")]
        return sorted(path for path in found if path not in self._old_logs)

    def _is_old(self, path: str) -> bool:
        """Whether a log is that of a script which has ended, as was said: nobody writes to it."""
        number = shell_number(path.removeprefix("in/"))
        record = self._journal.newest.get(number) if number is not None else None
        return record is not None and record.state is CommandState.ENDED and self.is_said(record)

    def problems(self) -> dict[str, str]:
        """What is wrong with files: path → why."""
        for path in self._log_paths():
            self._too_large.pop(path, None)
            with contextlib.suppress(OSError):  # then it is among the files that cannot be read
                size = held(self._layout.root / path)
                if size > 2 * LOG_BUDGET:
                    why = "its file system does not let the beginning of a file be freed"
                    self._too_large[path] = f"holds {size >> 20} MiB, more than its budget: {why}"
        wrong = self._local.problems | self._checkpoints.problems
        return self._tails.problems() | self._too_large | wrong

    def unsent(self) -> int:
        """How many bytes were not collected yet."""
        files = self._local.unsent() + self._checkpoints.unsent()
        return sum(self._tails.behind(path) for path in self.growing()) + files

    def is_behind(self) -> bool:
        """Whether something was not collected yet, as far as the last scan of files saw."""
        records = self.has_records() or bool(self.held())
        files = self._local.is_behind() or self._checkpoints.is_behind()
        return records or self.unsent() > 0 or files

    def is_said(self, record: JournalRecord) -> bool:
        """Whether a record was collected."""
        place = self._journal.place(record)
        return place <= int(self._state.get("journal_sent", 0)) and place not in self.held()

    # States

    def pack_up(self, acked: int) -> None:
        """See `link.Outgoing`."""
        self._unacked.pack_up(acked, self._put_chunk)
        self._contents.pack_up(itertools.chain(self._local.live(), self._checkpoints.live()))
        self._checkpoints.look_again()

    def restate(self) -> list[Message]:
        """See `link.Outgoing`."""
        held, sent = set(self.held()), int(self._state.get("journal_sent", 0))
        files = [*self._local.restate(), *self._checkpoints.restate()]
        messages: list[Message] = [*files, *self._unacked.restate()]
        for place, record in self._journal.since(0, sys.maxsize):
            if place <= sent and place not in held:
                messages += self._said(record)
        return messages

    def unacked(self, acked: int) -> int:
        """See `link.Outgoing`."""
        return self._unacked.size(acked)

    def kept_objects(self) -> set[str]:
        """See `link.Outgoing`."""
        return self._unacked.objects() | self._contents.objects()

    def make_again(self, lost: set[str]) -> None:
        """See `link.Outgoing`."""
        contents = self._contents.lose(lost)
        self._local.send_again(contents)
        self._checkpoints.send_again(contents)
        self._unacked.lose(lost)

    def _said(self, record: JournalRecord) -> list[Message]:
        """A record as it is said: a run's result before its end."""
        run = self._results.get(record.run_id) if record.state is CommandState.ENDED else None
        return [*([RunEnded(record=run)] if run else []), Journal(record=record)]

    # Records

    def has_records(self) -> bool:
        """Whether there are records that were not collected yet."""
        return bool(self._journal.since(int(self._state.get("journal_sent", 0)), 0))

    def held(self) -> list[int]:
        """Places of records that wait for their run's files."""
        return list(self._state.get("journal_held", []))

    def _candidates(self, budget: int) -> list[tuple[int, JournalRecord]]:
        """Return records that were not said, with their places; for an end, note what its log
        still owes. Call it before the logs are collected: each log was whole before its record."""
        self._state.on_rollback(self._owed.clear)
        held = [(p, r) for p in self.held() if (r := self._journal.at(p)) is not None]
        new = self._journal.since(int(self._state.get("journal_sent", 0)), budget)
        if new:
            self._state.put("journal_sent", new[-1][0])
        for place, record in held + new:
            if _is_end(record) and place not in self._owed:
                path = self._log_of(record)
                self._owed[place] = (path, self._tails.behind(path))
        return held + new

    def _count_down(self, appends: Sequence[Message]) -> None:
        """Take what was just collected of logs off what they owe."""
        for message in appends:
            if isinstance(message, Append):
                for place, (path, left) in self._owed.items():
                    if path == message.path:
                        self._owed[place] = (path, left - (message.end - message.start))

    def _ready(self, candidates: Sequence[tuple[int, JournalRecord]]) -> list[Message]:
        """Return those of the records that can be said, each run's result before its end."""
        waiting = [p for p, r in candidates if self._waits_for_files(r) or self._waits_for_log(p)]
        for place in self._owed.keys() - set(waiting):
            del self._owed[place]
        if waiting != self.held():
            self._state.put("journal_held", waiting)
        said = [(p, r) for p, r in candidates if p not in waiting]
        return [message for _, record in said for message in self._said(record)]

    def _log_of(self, record: JournalRecord) -> str:
        return f"in/{self._layout.run_log(record.run_id).name}"

    def _waits_for_log(self, place: int) -> bool:
        path, left = self._owed.get(place, ("", 0))
        # A log that was cut meanwhile owes nothing once it is sent to its end.
        return left > 0 and self._tails.behind(path) > 0

    def _waits_for_files(self, record: JournalRecord) -> bool:
        if not _is_end(record):
            return False
        with self._lock:
            started, finished = self._scans
            needed = self._after_scan.setdefault(record.run_id, started + 1)
        prefix = f"in/artifacts/{record.run_id}/"
        if finished < needed or self._local.waiting((prefix, CHAMPION)):
            return True
        return any(self._tails.behind(p) for p in self._local.growing if p.startswith(prefix))


def _is_end(record: JournalRecord) -> bool:
    """Whether a record ends a command that had a process."""
    return record.state is CommandState.ENDED and record.attempt > 0
