"""What the worker says first, when it has more to say than goes into one pack."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from stepping import Clock

from protocol.journal import JournalRecord
from protocol.messages import Append, Journal, Message, PutFile
from protocol.paths import Layout
from protocol.states import Result
from protocol.states import State as CommandState
from syncd.delivery import outgoing
from syncd.delivery.checkpoints import Checkpoints
from syncd.delivery.contents import Contents
from syncd.delivery.files import LocalFiles
from syncd.delivery.holds import Holds
from syncd.delivery.link import Link
from syncd.delivery.outgoing import WorkerOutgoing
from syncd.delivery.proofs import Proofs
from syncd.delivery.streams import Tails
from syncd.delivery.unacked import Unacked
from syncd.records import JournalFile, ResultsFile
from syncd.state import State

BUDGET = 64 * 1024
FLOOD = b"some words\n" * 100_000


class Speaker:
    """A worker's outgoing side over real files, one pack at a time."""

    def __init__(self, layout: Layout, state: State) -> None:
        self.layout = layout
        self.state = state
        self.journal = JournalFile(state, layout.journal)
        self.contents = Contents(state, layout.private, _no_link)
        self.outgoing = WorkerOutgoing(
            layout=layout,
            state=state,
            journal=self.journal,
            results=ResultsFile(state, layout.results),
            tails=Tails(state, layout.root),
            unacked=Unacked(state, layout.root),
            local=LocalFiles(state, layout.root, self.contents),
            checkpoints=self._checkpoints(layout, state),
            contents=self.contents,
            put_chunk=lambda data: pytest.fail("nothing is packed up here"),
        )
        self.packs = 0

    def _checkpoints(self, layout: Layout, state: State) -> Checkpoints:
        return Checkpoints(
            state=state,
            root=layout.root,
            contents=self.contents,
            proofs=Proofs(state, _no_link, layout.private, lambda: 0.0),
            holds=Holds(layout.private / "held"),
            is_over=lambda run: False,
            sent=lambda: self.packs,
            make_again=lambda lost: pytest.fail("nothing is lost here"),
        )

    def pack(self) -> list[Message]:
        self.packs += 1
        with self.state.transaction():
            return self.outgoing.collect(self.packs, BUDGET, redraws=True)

    def end(self, number: int, stage: str) -> None:
        for state in CommandState.CLAIMED, CommandState.STARTED, CommandState.ENDED:
            self.journal.add(
                JournalRecord(
                    number=number,
                    line=f"run:{stage}",
                    state=state,
                    time=0.0,
                    worker="w-000001-00000000",
                    run_id=f"{stage}.{number:04}.abcd",
                    attempt=0 if state is CommandState.CLAIMED else 1,
                    result=Result.SUCCESS if state is CommandState.ENDED else None,
                )
            )


def _no_link() -> Link:
    raise AssertionError("these contents are small")


@pytest.fixture
def speaker(tmp_path: Path) -> Iterator[Speaker]:
    layout = Layout(tmp_path)
    for folder in layout.artifacts, layout.private:
        folder.mkdir(parents=True)
    state = State(layout.private / "state.db")
    yield Speaker(layout, state)
    state.close()


def ends(messages: list[Message]) -> list[int]:
    return [
        message.record.number
        for message in messages
        if isinstance(message, Journal) and message.record.state is CommandState.ENDED
    ]


def test_logs_that_flood_keep_neither_another_log_nor_files_waiting(speaker: Speaker) -> None:
    for name in "flood", "gush", "pour":
        (speaker.layout.inbox / f"{name}.log").write_bytes(FLOOD)
    (speaker.layout.inbox / "quiet.log").write_bytes(b"one line\n")
    (speaker.layout.artifacts / "quiet.0001.abcd").mkdir()
    (speaker.layout.artifacts / "quiet.0001.abcd" / "made.txt").write_bytes(b"bytes")
    speaker.end(1, "quiet")
    said = speaker.pack()
    assert b"one line\n" in [m.blob for m in said if isinstance(m, Append)]
    speaker.outgoing.scan()  # looks at the files after the end, as the record has to wait for
    said = speaker.pack()
    assert [m.path for m in said if isinstance(m, PutFile)] == [
        "in/artifacts/quiet.0001.abcd/made.txt"
    ]
    assert ends(said) == [1]


def _until_ended(speaker: Speaker) -> Iterator[list[Message]]:
    while True:
        said = speaker.pack()
        yield said
        if ends(said):
            return


def test_that_a_run_has_ended_is_said_after_the_last_byte_of_its_log(speaker: Speaker) -> None:
    log = speaker.layout.inbox / "flood.log"
    log.write_bytes(FLOOD)
    speaker.end(1, "flood")
    speaker.pack()
    speaker.outgoing.scan()
    said = [message for pack in _until_ended(speaker) for message in pack]
    assert ends(said) == [1]
    sent = [(m.end, at) for at, m in enumerate(said) if isinstance(m, Append)]
    assert sent[-1][0] == len(FLOOD)
    assert isinstance(said[-1], Journal)


def test_what_a_later_run_adds_to_the_log_does_not_hold_up_the_end(speaker: Speaker) -> None:
    log = speaker.layout.inbox / "flood.log"
    log.write_bytes(FLOOD)
    speaker.end(1, "flood")
    speaker.pack()
    speaker.outgoing.scan()
    packs = 0
    for _ in _until_ended(speaker):
        packs += 1
        with open(log, "ab") as more:
            more.write(FLOOD[: 2 * BUDGET])
    assert packs <= len(FLOOD) // (BUDGET // 2) + 2


def _cut(log: Path) -> None:
    log.write_bytes(b"anew\n")


@pytest.mark.parametrize("lose", [Path.unlink, _cut])
def test_a_log_that_is_cut_or_gone_does_not_hold_up_the_end(
    speaker: Speaker, lose: Callable[[Path], None]
) -> None:
    log = speaker.layout.inbox / "flood.log"
    log.write_bytes(FLOOD)
    speaker.end(1, "flood")
    assert ends(speaker.pack()) == []
    speaker.outgoing.scan()
    lose(log)
    assert ends(speaker.pack()) == [1]


def test_a_log_that_cannot_be_read_is_named_and_holds_up_nothing(
    speaker: Speaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.open

    def opening(path: str, flags: int, mode: int = 0o777, **how: int) -> int:
        if str(path).endswith("bad.log"):
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)
        return real(path, flags, mode, **how)

    (speaker.layout.inbox / "bad.log").write_bytes(b"cannot be read\n")
    (speaker.layout.inbox / "good.log").write_bytes(b"can\n")
    speaker.end(1, "bad")
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", opening)
        assert [m.blob for m in speaker.pack() if isinstance(m, Append)] == [b"can\n"]
        speaker.outgoing.scan()
        said = speaker.pack()
        assert ends(said) == [1]
        assert speaker.outgoing.problems() == {
            "in/bad.log": f"cannot be read: {os.strerror(errno.EIO)}"
        }
    said = speaker.pack()
    assert [m.blob for m in said if isinstance(m, Append)] == [b"cannot be read\n"]
    assert speaker.outgoing.problems() == {}


def test_a_log_that_outgrows_its_budget_is_named(
    speaker: Speaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outgoing, "LOG_BUDGET", 2**20)
    (speaker.layout.inbox / "flood.log").write_bytes(bytes(2**20))
    assert speaker.outgoing.problems() == {}
    (speaker.layout.inbox / "flood.log").write_bytes(bytes(3 * 2**20))
    (why,) = speaker.outgoing.problems().values()
    assert why.startswith("holds 3 MiB, more than its budget")


def test_logs_of_old_scripts_cost_a_round_nothing(
    speaker: Speaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)
    for number in range(1, 51):
        (speaker.layout.shell_log(number)).write_bytes(b"a line\n")
        speaker.end(number, "sh")
    clock.advance(5.0)  # what was written just now may be written again without showing it
    speaker.pack()
    speaker.outgoing.scan()
    speaker.pack()
    speaker.pack()
    looked: list[str] = []
    look = Tails._look
    monkeypatch.setattr(Tails, "_look", lambda self, path: looked.append(path) or look(self, path))
    assert not speaker.pack()
    assert speaker.outgoing.unsent() == 0
    assert not looked
    with speaker.layout.shell_log(7).open("ab") as file:
        file.write(b"by hand\n")
    clock.advance(outgoing.OLD_LOGS_SECONDS + 1)
    assert [m.blob for m in speaker.pack() if isinstance(m, Append)] == [b"by hand\n"]


def test_a_log_of_a_script_that_runs_is_never_old(
    speaker: Speaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)
    log = speaker.layout.shell_log(1)
    log.write_bytes(b"a line\n")
    clock.advance(5.0)
    for _ in range(3):
        speaker.pack()
    with log.open("ab") as file:
        file.write(b"another\n")
    assert [m.blob for m in speaker.pack() if isinstance(m, Append)] == [b"another\n"]
