"""Growing files, sent by their new bytes and put together again, through crashes and rotations."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from crashing import taken_back
from hypothesis import given, settings
from hypothesis import strategies as st
from stepping import Clock

from protocol.logs import drop_redraws
from protocol.messages import Append
from syncd import holes
from syncd.delivery import joins, parked, streams
from syncd.delivery.joins import Joins
from syncd.delivery.streams import Tails
from syncd.delivery.unacked import Unacked
from syncd.holes import free_until
from syncd.log_parts import rotate, rotated
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


def rewrite(pair):
    """Write other bytes of the same number in the same file."""
    with open(pair.source, "r+b") as file:
        file.write(b"eno\n")


@pytest.mark.parametrize(
    ("touch", "blobs"),
    [
        (lambda pair: pair.write(b"two\n"), [b"two\n"]),
        (rewrite, [b"eno\n"]),
        (lambda pair: os.truncate(pair.source, 0), []),
        (lambda pair: pair.source.unlink(), []),
        (lambda pair: (rotate(pair.source, limit=1), pair.write(b"two\n")), [b"two\n"]),
    ],
)
def test_a_file_is_settled_until_something_touches_it(pair, monkeypatch, touch, blobs):
    clock = Clock(monkeypatch)
    pair.write(b"one\n")
    pair.collect()
    assert not pair.tails.is_settled(LOG)  # it may be changed within this moment still
    clock.advance(streams.FRESH_SECONDS)
    pair.collect()
    assert pair.tails.is_settled(LOG)
    assert pair.tails.behind(LOG) == 0
    touch(pair)
    assert not pair.tails.is_settled(LOG)
    assert [message.blob for message in pair.collect()] == blobs


@pytest.mark.parametrize("error", [NotADirectoryError, PermissionError])
def test_a_settled_file_that_cannot_be_looked_at_is_no_fault(pair, monkeypatch, error):
    clock = Clock(monkeypatch)
    pair.write(b"one\n")
    clock.advance(streams.FRESH_SECONDS)
    pair.collect()

    def lstat(path):
        raise error(errno.EACCES, "no", str(path))

    monkeypatch.setattr(Path, "lstat", lstat)
    assert not pair.tails.is_settled(LOG)
    pair.tails.behind(LOG)


def test_a_file_is_not_settled_by_what_was_taken_back(pair, monkeypatch):
    clock = Clock(monkeypatch)
    pair.write(b"one\n")
    clock.advance(streams.FRESH_SECONDS)
    with taken_back(pair.states[0]):
        assert pair.collect()
    assert not pair.tails.is_settled(LOG)
    assert [message.blob for message in pair.collect()] == [b"one\n"]


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


def test_nor_is_one_of_the_same_size(pair):
    pair.write(b"run 1\n")
    pair.send()
    pair.source.unlink()
    pair.write(b"run 2\n")
    pair.states[0].run("UPDATE tails SET inode = ?", pair.source.stat().st_ino)
    pair.send()
    assert pair.target.read_bytes() == b"run 1\nrun 2\n"


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


# What a log's budget has freed

BLOCK = 4096


@pytest.fixture
def small_steps(monkeypatch):
    """Holes of one block, in place of megabytes."""
    for module in (holes, streams):
        monkeypatch.setattr(module, "STEP", BLOCK)


def lines(first, last):
    """Blocks of lines that say which block they are of."""
    return b"".join(b"%07d\n" % number * (BLOCK // 8) for number in range(first, last))


def free(path, blocks):
    with open(path, "r+b") as file:
        free_until(file.fileno(), blocks * BLOCK)


GAP = b"\n[syncd] %d bytes of this log are missing here\n"


def test_what_was_freed_before_it_was_sent_is_a_gap_and_no_zeros(pair, small_steps):
    pair.write(lines(0, 8))
    pair.collect(budget=3 * BLOCK, terminal=True)
    free(pair.source, 5)
    assert pair.tails.behind(LOG) == 3 * BLOCK
    (segment,) = pair.collect(terminal=True)
    assert (segment.start, segment.end, segment.blob) == (5 * BLOCK, 8 * BLOCK, lines(5, 8))
    assert pair.tails.behind(LOG) == 0


def test_the_reader_is_told_how_much_was_freed(pair, small_steps):
    pair.write(lines(0, 2))
    pair.send(terminal=True)
    pair.write(lines(2, 6))
    free(pair.source, 4)
    pair.send(terminal=True)
    assert pair.target.read_bytes() == lines(0, 2) + GAP % (2 * BLOCK) + lines(4, 6)


def test_a_log_of_which_what_was_sent_is_freed_goes_on_as_the_same_stream(pair, small_steps):
    pair.write(lines(0, 4))
    (first,) = pair.collect(terminal=True)
    free(pair.source, 3)
    pair.write(lines(4, 5))
    (second,) = pair.collect(terminal=True)
    free(pair.source, 5)
    pair.write(b"last\n")
    (third,) = pair.collect(terminal=True)
    assert {first.stream, second.stream, third.stream} == {first.stream}
    pair.deliver([first, second, third])
    assert pair.target.read_bytes() == lines(0, 5) + b"last\n"


def test_a_log_that_was_emptied_and_freed_again_is_another(pair, small_steps):
    pair.write(lines(0, 4))
    pair.send(terminal=True)
    pair.source.write_bytes(lines(10, 16))
    free(pair.source, 2)
    pair.send(terminal=True)
    assert pair.target.read_bytes() == lines(0, 4) + GAP % (2 * BLOCK) + lines(12, 16)


def test_a_worker_without_a_memory_sends_what_is_left_of_a_log(pair, small_steps):
    pair.write(lines(0, 4))
    free(pair.source, 2)
    pair.send(terminal=True)
    assert pair.target.read_bytes() == GAP % (2 * BLOCK) + lines(2, 4)


def test_zeros_that_a_program_wrote_into_a_file_of_its_own_are_sent(tmp_path, small_steps):
    pair = Pair(tmp_path, "in/artifacts/r/events.out.tfevents.1")
    pair.write(lines(0, 4))
    free(pair.source, 2)
    pair.send()
    assert pair.target.read_bytes() == bytes(2 * BLOCK) + lines(2, 4)
    pair.close()


def test_a_state_repeats_of_a_log_what_is_left_of_it(pair, small_steps, monkeypatch):
    monkeypatch.setattr("syncd.delivery.unacked.LITTLE_BYTES", 0)
    unacked = Unacked(pair.states[0], pair.here)
    chunks = []

    def put_chunk(data):
        chunks.append(data)
        return f"chunk-{len(chunks)}"

    for number in range(3):
        pair.write(lines(2 * number, 2 * number + 2))
        with pair.states[0].transaction():
            unacked.note(number + 1, pair.tails.collect(LOG, 10**9, terminal=True))
        if number == 1:
            free(pair.source, 1)
            unacked.pack_up(0, put_chunk)
    free(pair.source, 5)
    chunk, inline = unacked.restate()
    assert (chunk.start, chunk.end, chunks) == (BLOCK, 4 * BLOCK, [lines(1, 4)])
    assert (inline.start, inline.end, inline.blob) == (5 * BLOCK, 6 * BLOCK, lines(5, 6))


@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(st.lists(st.sampled_from(["write", "write", "collect", "free", "rotate"]), max_size=14))
def test_however_a_log_is_freed_what_arrives_is_what_was_written_less_gaps(
    tmp_path_factory, actions
):
    with pytest.MonkeyPatch.context() as patch:
        for module in (holes, streams):
            patch.setattr(module, "STEP", BLOCK)
        pair = Pair(tmp_path_factory.mktemp("pair"))
        written = 0
        for action in [*actions, "collect"]:
            size = pair.source.stat().st_size if pair.source.exists() else 0
            if action == "write":
                pair.write(lines(written, written + 2))
                written += 2
            elif action == "free":
                if size:
                    free(pair.source, size // BLOCK - 1)
            elif action == "rotate":
                pair.send(terminal=True)
                rotate(pair.source, limit=1)
            else:
                pair.deliver(pair.collect(budget=3 * BLOCK, terminal=True))
        pair.send(terminal=True)
        data = pair.target.read_bytes() if pair.target.exists() else b""
        assert b"\0" not in data
        told = sum(int(line.split()[1]) for line in data.splitlines() if b"missing" in line)
        numbers = [line for line in data.splitlines() if line.isdigit()]
        assert numbers == sorted(numbers)
        assert len(numbers) * 8 + told == written * BLOCK
        pair.close()


# What cannot be read


@pytest.fixture
def unreadable(monkeypatch):
    """A function that has the system refuse to open a file, as a bad disk does, or no more."""
    refused = set()
    real = os.open

    def opening(path, flags, *args, **how):
        if os.fspath(path) in refused:
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)
        return real(path, flags, *args, **how)

    monkeypatch.setattr(os, "open", opening)

    def refuse(path, *, yes=True):
        (refused.add if yes else refused.discard)(str(path))

    return refuse


def test_a_log_that_cannot_be_read_is_named_and_tried_again(pair, unreadable):
    pair.write(b"one\n")
    unreadable(pair.source)
    assert pair.collect() == []
    assert pair.tails.problems() == {LOG: "cannot be read: Input/output error"}
    assert pair.tails.behind(LOG) == 0
    unreadable(pair.source, yes=False)
    pair.send()
    assert pair.tails.problems() == {}
    assert pair.target.read_bytes() == b"one\n"


def test_of_a_log_that_fails_halfway_nothing_is_lost_or_sent_twice(pair, monkeypatch):
    pair.write(b"old\n")
    rotate(pair.source, limit=1)
    pair.write(b"new\n")
    real, failing = streams.read_segment, []

    def reading(file, *args, **how):
        if failing and file.name == str(pair.source):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(file, *args, **how)

    monkeypatch.setattr(streams, "read_segment", reading)
    failing.append(True)
    first = pair.collect()
    assert [message.blob for message in first] == [b"old\n"]
    assert LOG in pair.tails.problems()
    failing.clear()
    pair.deliver(first)
    pair.send()
    assert pair.target.read_bytes() == b"old\nnew\n"


def test_a_folder_or_a_link_in_a_logs_place_is_named(pair):
    for make in (os.mkdir, lambda path: path.symlink_to(pair.here / "elsewhere")):
        make(pair.source)
        pair.collect()
        assert pair.tails.problems() == {LOG: "left out: a link, or no regular file"}
        pair.source.rmdir() if pair.source.is_dir() else pair.source.unlink()
        assert pair.tails.problems() == {}


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
    monkeypatch.setattr(joins, "rotate", lambda path: rotate(path, limit=8))
    pair.deliver([segment(0, b"a long line\n")])
    messages = [segment(0, b"one\n", "t"), segment(4, b"two\n", "t")]
    with taken_back(pair.states[1]):
        for message in messages:
            pair.joins.apply(message)
    pair.deliver(messages)
    assert pair.target.read_bytes() == b"one\ntwo\n"
    assert rotated(pair.target).read_bytes() == b"a long line\n"


def test_a_stream_that_becomes_long_goes_on_in_a_new_part_and_the_newest_is_kept(pair, monkeypatch):
    monkeypatch.setattr(joins, "rotate", lambda path: rotate(path, limit=20))
    written = b""
    for number in range(30):
        line = b"line %d\n" % number
        pair.deliver([segment(len(written), line)])
        written += line
    both = rotated(pair.target).read_bytes() + pair.target.read_bytes()
    assert written.endswith(both)
    assert 20 < len(both) <= 60


@pytest.mark.parametrize("crash_after", [1, 2, 3])
def test_a_crash_around_a_rotation_in_the_middle_of_a_stream_doubles_nothing(
    pair, monkeypatch, crash_after
):
    monkeypatch.setattr(joins, "rotate", lambda path: rotate(path, limit=8))
    pair.deliver([segment(0, b"first line\n")])
    messages = [segment(11, b"2\n"), segment(13, b"3\n"), segment(15, b"4\n")]
    for _ in range(2):
        with taken_back(pair.states[1]):
            for message in messages[:crash_after]:
                pair.joins.apply(message)
    pair.deliver(messages)
    assert rotated(pair.target).read_bytes() == b"first line\n"
    assert pair.target.read_bytes() == b"2\n3\n4\n"


def test_what_a_crash_left_beyond_the_record_is_in_neither_part(pair, monkeypatch):
    monkeypatch.setattr(joins, "rotate", lambda path: rotate(path, limit=8))
    pair.deliver([segment(0, b"first line\n")])
    with open(pair.target, "ab") as file:
        file.write(b"half of a li")
    pair.deliver([segment(11, b"2\n")])
    assert rotated(pair.target).read_bytes() == b"first line\n"
    assert pair.target.read_bytes() == b"2\n"


def refuse_to_write(monkeypatch, pair, error):
    """Have each write of the log fail, as on an immutable file; return what ends that."""
    failing = [True]
    real = joins._opened

    def opened(target, path):
        if failing and path == LOG:
            raise OSError(error, os.strerror(error))
        return real(target, path)

    monkeypatch.setattr(joins, "_opened", opened)
    return failing.clear


def test_what_cannot_be_written_waits_in_order_and_its_file_is_named(pair, monkeypatch):
    pair.deliver([segment(0, b"one\n")])
    mend = refuse_to_write(monkeypatch, pair, errno.EPERM)
    other = Append(path="in/gate.log", stream="s", start=0, end=6, blob=b"other\n")
    pair.deliver([segment(4, b"two\n"), other])
    pair.deliver([segment(8, b"three\n")])
    assert (pair.there / "in/gate.log").read_bytes() == b"other\n"
    pair.joins.retry()
    why = "cannot be written: Operation not permitted; 10 bytes of it wait"
    assert pair.joins.problems == {LOG: why}
    mend()
    pair.deliver([segment(14, b"four\n")])  # in its turn, though it could be written
    assert pair.target.read_bytes() == b"one\n"
    pair.joins.retry()
    assert pair.target.read_bytes() == b"one\ntwo\nthree\nfour\n"
    assert pair.joins.problems == {}
    pair.deliver([segment(19, b"five\n")])
    assert pair.target.read_bytes().endswith(b"four\nfive\n")


def test_what_waits_survives_a_restart(pair, monkeypatch):
    pair.deliver([segment(0, b"one\n")])
    mend = refuse_to_write(monkeypatch, pair, errno.EROFS)
    pair.deliver([segment(4, b"two\n")])
    mend()
    Joins(pair.states[1], pair.there).retry()
    assert pair.target.read_bytes() == b"one\ntwo\n"


def test_of_what_waits_the_newest_is_kept_and_the_rest_is_a_gap(pair, monkeypatch):
    monkeypatch.setattr(parked, "ROTATE_BYTES", 10)
    pair.deliver([segment(0, b"one\n")])
    mend = refuse_to_write(monkeypatch, pair, errno.EPERM)
    pair.deliver([segment(4 + 4 * number, b"%3d\n" % number) for number in range(5)])
    mend()
    pair.joins.retry()
    assert pair.target.read_bytes() == b"one\n" + GAP % 12 + b"  3\n  4\n"


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EDQUOT])
def test_on_a_full_disk_nothing_is_passed_over(pair, monkeypatch, error):
    pair.deliver([segment(0, b"one\n")])
    mend = refuse_to_write(monkeypatch, pair, error)
    with pytest.raises(OSError, match=os.strerror(error)):
        pair.deliver([segment(4, b"two\n")])
    mend()
    pair.deliver([segment(4, b"two\n")])
    assert pair.target.read_bytes() == b"one\ntwo\n"


def test_an_immutable_log_holds_up_no_other_message(pair):
    pair.deliver([segment(0, b"one\n")])
    done = subprocess.run(["chattr", "+i", pair.target], capture_output=True, check=False)
    if done.returncode:
        pytest.skip("no file can be made immutable here")
    try:
        pair.deliver([segment(4, b"two\n")])
        assert "Operation not permitted" in pair.joins.problems[LOG]
    finally:
        subprocess.run(["chattr", "-i", pair.target], check=True)
    pair.joins.retry()
    assert pair.target.read_bytes() == b"one\ntwo\n"


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
