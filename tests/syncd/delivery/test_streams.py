"""Growing files, sent by their new bytes and put together again, through crashes and rotations."""

from __future__ import annotations

import os
import shutil

import pytest
from crashing import taken_back
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.logs import drop_redraws
from protocol.messages import Append
from syncd.delivery import streams
from syncd.delivery.streams import Joins, Tails, rotate, rotated
from syncd.state import State

LOG = "in/pretrain.log"


class Pair:
    """A sender and a receiver, each with a state and a folder of its own."""

    def __init__(self, root, path=LOG):
        self.path = path
        self.here, self.there = root / "here", root / "there"
        for folder in (self.here, self.there):
            (folder / path).parent.mkdir(parents=True)
        self.states = [State(root / "here.db"), State(root / "there.db")]
        self.tails = Tails(self.states[0], self.here)
        self.joins = Joins(self.states[1], self.there)

    @property
    def source(self):
        return self.here / self.path

    @property
    def target(self):
        return self.there / self.path

    def write(self, data):
        with open(self.source, "ab") as file:
            file.write(data)

    def collect(self, budget=10**9, *, terminal=False):
        with self.states[0].transaction():
            return self.tails.collect(self.path, budget, terminal=terminal)

    def deliver(self, messages):
        with self.states[1].transaction():
            for message in messages:
                self.joins.apply(message)

    def send(self, **how):
        """Bring over all that there is, as pushes would."""
        while messages := self.collect(**how):
            self.deliver(messages)

    def close(self):
        for state in self.states:
            state.close()


@pytest.fixture
def pair(tmp_path):
    pair = Pair(tmp_path)
    yield pair
    pair.close()


# Sending


def test_what_was_appended_is_sent_once(pair):
    pair.write(b"one\n")
    (first,) = pair.collect()
    assert (first.start, first.end, first.blob) == (0, 4, b"one\n")
    assert pair.collect() == []
    pair.write(b"two\n")
    (second,) = pair.collect()
    assert (second.stream, second.start, second.blob) == (first.stream, 4, b"two\n")
    assert pair.tails.behind(LOG) == 0


def test_a_missing_file_and_an_empty_one_give_nothing(pair):
    assert pair.collect() == []
    pair.write(b"")
    assert pair.collect() == []
    assert pair.tails.behind(LOG) == 0


def test_the_budget_bounds_what_is_read_and_nothing_is_lost_by_it(pair):
    pair.write(bytes(range(256)) * 10)
    (first,) = pair.collect(budget=100)
    assert len(first.blob) == 100
    assert pair.tails.behind(LOG) == 2460
    assert pair.collect(budget=0) == []
    pair.deliver([first])
    pair.send(budget=777)
    assert pair.target.read_bytes() == pair.source.read_bytes()


def test_a_collect_that_was_taken_back_comes_again(pair):
    pair.write(b"one\n")
    with taken_back(pair.states[0]):
        pair.tails.collect(LOG, 100, terminal=False)
    pair.write(b"two\n")
    (message,) = pair.collect()
    assert (message.start, message.blob) == (0, b"one\ntwo\n")


def test_a_rotated_file_is_sent_to_its_end_before_the_new_one(pair):
    pair.write(b"old 1\n")
    pair.send()
    pair.write(b"old 2\n")
    rotate(pair.source, limit=1)
    pair.write(b"new 1\n")
    assert pair.tails.behind(LOG) == 12
    last, first = pair.collect()
    assert (last.blob, first.blob) == (b"old 2\n", b"new 1\n")
    assert last.stream != first.stream
    pair.deliver([last, first])
    assert pair.target.read_bytes() == b"old 1\nold 2\nnew 1\n"
    assert pair.collect() == []


def test_a_part_that_was_rotated_before_it_was_looked_at_is_sent_too(pair):
    pair.write(b"old\n")
    rotate(pair.source, limit=1)
    pair.write(b"new\n")
    pair.send()
    assert pair.target.read_bytes() == b"old\nnew\n"


def test_a_rotation_in_the_middle_of_a_collect_loses_and_doubles_nothing(pair, monkeypatch):
    pair.write(b"old\n")
    pair.send()
    pair.write(b"older part\n")
    opened, real = [], streams._open

    def rotate_after_first(path, stack):
        file = real(path, stack)
        if not opened:
            rotate(pair.source, limit=1)
            pair.write(b"new\n")
        opened.append(path)
        return file

    monkeypatch.setattr(streams, "_open", rotate_after_first)
    pair.send()
    assert pair.target.read_bytes() == b"old\nolder part\nnew\n"


def test_a_file_that_was_emptied_begins_anew(pair):
    pair.write(b"a long first line\n")
    pair.send()
    pair.source.write_bytes(b"short\n")
    pair.send()
    assert pair.target.read_bytes() == b"a long first line\nshort\n"


@pytest.mark.parametrize("second", [b"other beginning\n and more", b"same length 2222\n and more"])
def test_a_file_that_was_emptied_and_grew_past_what_was_sent_begins_anew(pair, second):
    pair.write(b"same length 1111\n"[: len(second)])
    pair.send()
    inode = pair.source.stat().st_ino
    pair.source.write_bytes(second)
    assert pair.source.stat().st_ino == inode
    pair.send()
    assert pair.target.read_bytes() == b"same length 1111\n" + second


def test_another_file_with_the_same_inode_is_not_taken_for_the_one_before(pair):
    pair.write(b"[syncd] start pretrain.0001.7f3a\n")
    pair.send()
    # What a file system may do when a file is deleted: its inode goes to the next one.
    row = pair.states[0].row("SELECT inode FROM tails")
    pair.source.unlink()
    pair.write(b"[syncd] start pretrain.0002.7f3a\nmore\n")
    pair.states[0].run("UPDATE tails SET inode = ?", pair.source.stat().st_ino)
    assert row is not None
    pair.send()
    assert pair.target.read_bytes().endswith(b"0001.7f3a\n[syncd] start pretrain.0002.7f3a\nmore\n")


def test_a_file_that_was_replaced_by_another_is_sent_whole(pair):
    pair.write(b"one\n")
    pair.send()
    other = pair.source.with_name("other")
    other.write_bytes(b"one\ntwo\n")
    os.replace(other, pair.source)
    pair.send()
    assert pair.target.read_bytes() == b"one\none\ntwo\n"
    assert pair.states[0].rows("SELECT COUNT(*) FROM tails") == [(1,)]


@pytest.mark.timeout(20)
def test_what_is_no_regular_file_is_left_alone(pair):
    outside = pair.here / "secret"
    outside.write_bytes(b"secret\n")
    for make in (os.mkfifo, lambda path: path.symlink_to(outside), os.mkdir):
        make(pair.source)
        assert pair.collect() == []
        assert pair.tails.behind(LOG) == 0
        pair.source.rmdir() if pair.source.is_dir() else pair.source.unlink()


def test_a_collect_of_a_file_that_did_not_grow_writes_nothing(pair):
    pair.write(b"one\n")
    pair.collect()
    before = pair.states[0]._db.total_changes
    pair.collect()
    assert pair.states[0]._db.total_changes == before


# Putting together


def segment(start, blob, stream="s", end=None):
    return Append(
        path=LOG,
        stream=stream,
        start=start,
        end=start + len(blob) if end is None else end,
        blob=blob,
    )


def test_a_segment_that_comes_twice_is_written_once(pair):
    pair.deliver([segment(0, b"one\n"), segment(0, b"one\n")])
    pair.deliver([segment(0, b"one\n"), segment(4, b"two\n")])
    assert pair.target.read_bytes() == b"one\ntwo\n"


def test_a_segment_that_overlaps_adds_only_what_is_new(pair):
    pair.deliver([segment(0, b"one\n"), segment(2, b"e\ntwo\n")])
    assert pair.target.read_bytes() == b"one\ntwo\n"


@pytest.mark.parametrize("before", [[], [segment(0, b"zero\n", "r")]])
def test_a_crash_between_the_write_and_the_commit_doubles_nothing(pair, before):
    pair.deliver(before)
    known = pair.target.read_bytes() if before else b""
    messages = [segment(0, b"one\n"), segment(4, b"two\n")]
    for crash_after in (1, 2):
        with taken_back(pair.states[1]):
            for message in messages[:crash_after]:
                pair.joins.apply(message)
    pair.deliver(messages)
    assert pair.target.read_bytes() == known + b"one\ntwo\n"


def test_bytes_that_a_crash_left_half_written_are_cut_off(pair):
    pair.deliver([segment(0, b"one\n")])
    with open(pair.target, "ab") as file:
        file.write(b"tw")
    pair.deliver([segment(4, b"two\n")])
    assert pair.target.read_bytes() == b"one\ntwo\n"


def test_a_crash_just_after_a_rotation_doubles_nothing(pair, monkeypatch):
    monkeypatch.setattr(streams, "rotate", lambda path: rotate(path, limit=8))
    pair.deliver([segment(0, b"a long line\n")])
    messages = [segment(0, b"one\n", "t"), segment(4, b"two\n", "t")]
    with taken_back(pair.states[1]):
        for message in messages:
            pair.joins.apply(message)
    pair.deliver(messages)
    assert pair.target.read_bytes() == b"one\ntwo\n"
    assert rotated(pair.target).read_bytes() == b"a long line\n"


def test_a_receiver_that_lost_its_state_builds_the_log_anew(pair):
    messages = [segment(0, b"one\n"), segment(4, b"two\n")]
    pair.deliver(messages)
    pair.states[1].run("DELETE FROM joins")
    pair.deliver(messages)
    assert pair.target.read_bytes() == b"one\ntwo\n"


def test_a_log_that_someone_cut_goes_on_where_it_ends(pair):
    pair.deliver([segment(0, b"one\ntwo\n")])
    os.truncate(pair.target, 4)
    pair.deliver([segment(8, b"three\n")])
    assert pair.target.read_bytes() == b"one\nthree\n"


def test_a_log_that_someone_deleted_goes_on(pair):
    pair.deliver([segment(0, b"one\n")])
    pair.target.unlink()
    pair.deliver([segment(4, b"two\n")])
    assert pair.target.read_bytes() == b"two\n"


def test_missing_bytes_are_marked_where_they_are_missing(pair):
    pair.deliver([segment(0, b"one\n"), segment(100, b"two\n")])
    note = b"\n[syncd] 96 bytes of this log are missing here\n"
    assert pair.target.read_bytes() == b"one\n" + note + b"two\n"


def test_a_note_is_written_into_no_file_that_programs_read(tmp_path):
    pair = Pair(tmp_path, "in/metrics.jsonl")
    pair.deliver(
        [
            Append(path=pair.path, stream="s", start=0, end=3, blob=b"{}\n"),
            Append(path=pair.path, stream="s", start=9, end=12, blob=b"{}\n"),
        ]
    )
    assert pair.target.read_bytes() == b"{}\n{}\n"
    pair.close()


@pytest.mark.parametrize(
    ("path", "joined"),
    [
        ("in/pretrain.log", b"epoch 3 los\n[syncd] start"),
        ("in/artifacts/r/metrics.jsonl", b"[syncd] start"),
        ("in/artifacts/r/events.out.tfevents.1", b"[syncd] start"),
    ],
)
def test_after_a_lost_vm_a_log_goes_on_on_a_line_of_its_own_and_other_files_begin_anew(
    tmp_path, path, joined
):
    pair = Pair(tmp_path, path)
    pair.write(b"epoch 3 los")
    pair.send()
    shutil.rmtree(pair.here)
    (pair.here / path).parent.mkdir(parents=True)
    pair.states[0].run("DELETE FROM tails")
    pair.write(b"[syncd] start")
    pair.send()
    assert pair.target.read_bytes() == joined
    pair.close()


# Both


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(st.data())
def test_any_growth_with_any_collects_arrives_byte_for_byte(tmp_path_factory, data):
    pair = Pair(tmp_path_factory.mktemp("pair"))
    written = b""
    for _ in range(data.draw(st.integers(1, 12))):
        # Lines are told apart by what was written before them, as those of a log are.
        part = b"%d " % len(written) + data.draw(st.binary(max_size=40)) + b"\n"
        action = data.draw(st.sampled_from(["grow", "grow", "collect", "crash", "rotate", "again"]))
        if action == "grow":
            pair.write(part)
            written += part
        elif action == "rotate":
            pair.send()
            rotate(pair.source, limit=1)
        elif action == "crash":
            with taken_back(pair.states[1]), taken_back(pair.states[0]):
                for message in pair.tails.collect(LOG, 30, terminal=False):
                    pair.joins.apply(message)
        else:
            messages = pair.collect(budget=data.draw(st.integers(0, 60)))
            pair.deliver(messages)
            if action == "again":
                pair.deliver(messages)
    pair.send()
    assert (pair.target.read_bytes() if pair.target.exists() else b"") == written
    pair.close()


@settings(max_examples=80, deadline=None, derandomize=True, database=None)
@given(
    parts=st.lists(st.text("ab\r\n", max_size=12).map(str.encode), max_size=8),
    budget=st.integers(1, 9),
)
def test_a_terminal_shows_what_was_sent_as_it_showed_the_original(tmp_path_factory, parts, budget):
    pair = Pair(tmp_path_factory.mktemp("pair"))
    pair.write(b"")
    for part in parts:
        pair.write(part)
        pair.deliver(pair.collect(budget, terminal=True))
    pair.send(terminal=True)
    sent = pair.target.read_bytes() if pair.target.exists() else b""
    assert drop_redraws(sent) == drop_redraws(b"".join(parts))
    pair.close()


def test_a_progress_bar_costs_its_last_state(pair):
    pair.write(b"".join(b"\r%3d%%" % n for n in range(100)) + b"\ndone\n")
    pair.send(terminal=True)
    assert pair.target.read_bytes() == b"\r 99%\ndone\n"
