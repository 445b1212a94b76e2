"""The state's file: transactions, what a full disk does to them, and what is no state."""

from __future__ import annotations

import sqlite3
import stat
import threading

import pytest
from crashing import taken_back

from protocol.errors import DataError
from syncd.state import SCHEMA_VERSION, State


@pytest.fixture
def state(tmp_path):
    state = State(tmp_path / "state.db")
    yield state
    state.close()


def test_a_value_is_there_after_it_was_opened_again(tmp_path, state):
    state.put("seq", {"deep": [1, None, "ä"]})
    state.close()
    again = State(tmp_path / "state.db")
    assert again.get("seq") == {"deep": [1, None, "ä"]}
    assert again.get("other", 7) == 7
    again.close()


def test_only_its_owner_can_read_it(tmp_path, state):
    assert stat.S_IMODE((tmp_path / "state.db").stat().st_mode) == 0o600


def test_a_transaction_that_fails_leaves_nothing(state):
    with taken_back(state):
        state.put("a", 1)
    assert state.get("a") is None
    with state.transaction():
        state.put("a", 2)
    assert state.get("a") == 2


def test_a_nested_transaction_is_part_of_the_outer_one(state):
    with taken_back(state), state.transaction():
        state.put("a", 1)
    assert state.get("a") is None


def test_what_is_kept_in_memory_hears_of_a_rollback_once_and_of_a_commit_never(state):
    heard = []

    def undo():
        heard.append(state.get("a"))

    with taken_back(state):
        state.put("a", 1)
        state.on_rollback(undo)
        with state.transaction():
            state.on_rollback(undo)
    assert heard == [None]
    with state.transaction():
        state.on_rollback(undo)
    with taken_back(state):
        pass
    assert heard == [None]
    with pytest.raises(RuntimeError):
        state.on_rollback(undo)


def test_another_thread_sees_a_transaction_whole_or_not_at_all(state):
    inside, seen = threading.Event(), []

    def look():
        inside.wait(10)
        seen.append((state.get("a"), state.get("b")))

    thread = threading.Thread(target=look)
    thread.start()
    with state.transaction():
        state.put("a", 1)
        inside.set()
        state.put("b", 1)
    thread.join()
    assert seen == [(1, 1)]


def test_a_full_disk_is_told_as_such_and_does_not_lock_the_state(state):
    (pages,) = state.row("PRAGMA page_count")
    state.rows(f"PRAGMA max_page_count = {pages + 2}")

    def fill():
        with state.transaction():
            for number in range(100):
                state.put(f"long {number}", "x" * 10_000)

    with pytest.raises(DataError, match=r"keep the state: .*state\.db: database or disk is full"):
        fill()
    state.rows("PRAGMA max_page_count = 100000")
    with state.transaction():
        state.put("a", 1)
    assert (state.get("a"), state.get("long 0")) == (1, None)


def test_a_commit_that_fails_is_taken_back(state, monkeypatch):
    execute = state._execute

    def fail(sql, values=()):
        if sql == "COMMIT":
            raise DataError("keep the state", why="database or disk is full")
        return execute(sql, values)

    monkeypatch.setattr(state, "_execute", fail)
    with pytest.raises(DataError), state.transaction():
        state.put("a", 1)
    monkeypatch.undo()
    with state.transaction():
        assert state.get("a") is None


def test_a_wrong_statement_is_a_fault_of_ours(state):
    with pytest.raises(sqlite3.OperationalError):
        state.rows("SELECT nothing FROM nowhere")


@pytest.mark.parametrize(
    "content", [b"not a database at all" * 400, b"SQLite format 3\0" + b"x" * 4096]
)
def test_a_damaged_file_is_named_with_what_to_do(tmp_path, content):
    (tmp_path / "state.db").write_bytes(content)
    with pytest.raises(DataError, match=r"open the state: .*state\.db: .*Move it away"):
        State(tmp_path / "state.db")


def test_a_folder_that_is_not_there_is_named(tmp_path):
    with pytest.raises(DataError, match="open the state"):
        State(tmp_path / "none" / "state.db")


def test_a_state_of_version_1_is_taken_over_with_the_checkpoints_that_were_said(tmp_path, state):
    for table in ("checkpoints", "proofs", "stored", "checkpoint_groups", "remote_groups"):
        state.run(f"DROP TABLE {table}")
    for column in ("first", "until"):
        state.run(f"ALTER TABLE remote_files DROP COLUMN {column}")
    state.run("PRAGMA user_version = 1")
    folder = "store/checkpoints/train.0001.7f3a"
    for path in ("in/artifacts/a", f"{folder}/1.pt", f"{folder}/metrics.jsonl"):
        state.run("INSERT INTO local_files VALUES (?, 1, 2, 3, 420, 'x', 1)", path)
    state.close()
    again = State(tmp_path / "state.db")
    assert again.rows("SELECT path, pack FROM checkpoints") == [(f"{folder}/1.pt", 1)]
    left = again.rows("SELECT path FROM local_files ORDER BY path")
    assert left == [("in/artifacts/a",), (f"{folder}/metrics.jsonl",)]
    again.close()


def test_a_state_of_a_newer_version_is_left_alone(tmp_path, state):
    state.run(f"PRAGMA user_version = {SCHEMA_VERSION + 1}")
    state.close()
    with pytest.raises(DataError, match=rf"of version {SCHEMA_VERSION + 1}.*newer one"):
        State(tmp_path / "state.db")
