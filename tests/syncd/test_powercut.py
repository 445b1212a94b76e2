"""Power cuts in the middle of what both ends keep: the journal, the key, the queue, the state.

`tests/support/powercut.py` says what a power cut may leave; each check opens that with the code
that would find it, and looks whether what was promised is there.
"""

from __future__ import annotations

import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from powercut_scenarios import (
    Scenario,
    assert_kept,
    assert_kept_after_kills,
    assert_needed,
    each_sync,
)

from protocol.journal import JournalRecord
from protocol.paths import Layout
from protocol.states import State
from syncd.config import Key, load_key
from syncd.records import JournalFile
from syncd.state import State as Database
from syncd.view import append_commands

DATABASE = Path(".syncd") / "state.db"


def private(root):
    (root / ".syncd").mkdir()


# The journal

RECORDS = [
    JournalRecord(
        number=number,
        line="run:pretrain",
        state=State.CLAIMED,
        time=1.0,
        worker="w-000001-7f3a9c02",
        run_id=f"pretrain.{number:04d}.7f3a",
    )
    for number in (1, 2, 3)
]


def add_records(root, done):
    state = Database(root / DATABASE)
    journal = JournalFile(state, root / "journal.jsonl")
    for record in RECORDS:
        # One that was read from the file is in the state by now, and there to be sent.
        if journal.add(record) or journal.place(record):
            done(str(record.number))
    state.close()


def journal_of(root):
    """Return the numbers of the records that an end finds there, which its file has too."""
    state = Database(root / DATABASE)
    try:
        journal = JournalFile(state, root / "journal.jsonl")
        numbers = [record.number for _, record in journal.since(0, 10**9)]
        text = b"".join(RECORDS[number - 1].encode() for number in numbers)
        assert numbers == list(range(1, len(numbers) + 1))
        assert not text or (root / "journal.jsonl").read_bytes() == text
        return numbers
    finally:
        state.close()


def check_records(root, done):
    without_state = root / "copy"
    without_state.mkdir()
    private(without_state)
    if (root / "journal.jsonl").exists():
        shutil.copy(root / "journal.jsonl", without_state)
    for place in (root, without_state):
        assert {str(number) for number in journal_of(place)} >= set(done)


EDITS = [b"what a person wrote\n", b"and what was not durable\n"]


def edited_journal(root):
    private(root)
    add_records(root, lambda what: None)
    with open(root / "journal.jsonl", "r+b") as file:
        file.write(EDITS[0])


def edit(root, done):
    with open(root / "journal.jsonl", "ab") as file:
        file.write(EDITS[1])  # by an editor that syncs nothing
    mend(root, done)


def mend(root, done):
    state = Database(root / DATABASE)
    JournalFile(state, root / "journal.jsonl")
    state.close()
    done("mended")


def check_mended(root, done):
    files = {path: path.read_bytes() for path in root.glob("journal.jsonl*")}
    assert any(EDITS[0] in data for data in files.values())
    if done:
        assert files[root / "journal.jsonl"] == b"".join(record.encode() for record in RECORDS)
        assert any(EDITS[1] in data for data in files.values())
    assert journal_of(root) == [1, 2, 3]


# Keys, and lines for the queue

KEYS = [Key.new(), Key.new()]


def old_key(root):
    KEYS[0].save(Layout(root))


def save_key(root, done):
    KEYS[1].save(Layout(root))
    done("saved")


def check_key(root, done):
    key = load_key(Layout(root), {})
    assert key == KEYS[1] if done else key in KEYS
    assert stat.S_IMODE(Layout(root).key.stat().st_mode) == 0o600


def save_first_key(root, done):
    KEYS[1].save(Layout(root))
    done("saved")


def check_first_key(root, done):
    key = load_key(Layout(root), {})
    assert key == KEYS[1] if done else key in (None, KEYS[1])


def queue_lines(root, done):
    for number in (1, 2):
        append_commands(Layout(root), [f"run:stage-{number}"])
        done(str(number))


def check_queued(root, done):
    path = Layout(root).queue
    lines = path.read_text().splitlines() if path.exists() else []
    assert {f"run:stage-{number}" for number in done} <= set(lines)


SCENARIOS = [
    Scenario(
        name="journal",
        start=private,
        act=add_records,
        check=check_records,
        syncs=[
            "journal.jsonl by JournalFile.add, append_durable",
            "./ by JournalFile.add, append_durable",
        ],
    ),
    Scenario(
        name="journal that was edited",
        start=edited_journal,
        act=edit,
        restart=mend,
        check=check_mended,
        syncs=[
            "journal.jsonl by _set_aside",
            "./ by _set_aside, rename_durable",
            ".journal.jsonl.tmp by JournalFile._reconcile, publish_bytes",
            "./ by JournalFile._reconcile, publish_bytes",
        ],
    ),
    Scenario(
        name="key saved",
        start=old_key,
        act=save_key,
        check=check_key,
        syncs=[
            "./ by make_private, make_dirs",
            ".syncd/.key.tmp by Key.save, publish_bytes",
            ".syncd by Key.save, publish_bytes",
        ],
        spare=["./ by make_private, make_dirs"],
    ),
    Scenario(
        name="first key saved",
        act=save_first_key,
        check=check_first_key,
        syncs=[
            "./ by make_private, make_dirs",
            ".syncd/.key.tmp by Key.save, publish_bytes",
            ".syncd by Key.save, publish_bytes",
        ],
    ),
    Scenario(
        name="lines queued",
        act=queue_lines,
        check=check_queued,
        syncs=[
            "queue.txt by append_commands",
            "./ by append_commands, fsync_dir",
        ],
    ),
]


@pytest.mark.parametrize("scenario", SCENARIOS, ids=str)
def test_a_power_cut_at_any_moment_breaks_no_promise(scenario, tmp_path):
    assert_kept(scenario, tmp_path)


@each_sync(SCENARIOS)
def test_without_this_sync_some_power_cut_breaks_a_promise(scenario, sync, tmp_path):
    assert_needed(scenario, sync, tmp_path)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=str)
def test_a_kill_and_a_restart_before_the_power_cut_break_no_promise(scenario, tmp_path):
    assert_kept_after_kills(scenario, tmp_path)


# What the layer takes for granted

COMMIT = """
import sys
from pathlib import Path
from syncd.state import State
state = State(Path(sys.argv[1]))
state.put("a", 1)
print("committed", flush=True)
"""


@pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace")
def test_sqlite_syncs_its_files_and_their_folder_before_a_commit_returns(tmp_path):
    """What the layer takes for granted of it: it makes these calls itself, in C."""
    calls = "openat,pwrite64,fsync,fdatasync,write"
    trace = ["strace", "-y", "-e", f"trace={calls}", "-o", tmp_path / "trace"]
    command = [*trace, sys.executable, "-c", COMMIT, tmp_path / "state.db"]
    if subprocess.run(command, stdout=subprocess.PIPE).returncode != 0:
        pytest.skip("processes must not be traced here")
    lines = (tmp_path / "trace").read_text().splitlines()
    end = next(at for at, line in enumerate(lines) if "committed" in line)
    synced = [line for line in lines[:end] if "sync(" in line]
    assert any(f"<{tmp_path}>" in line for line in synced)  # the folder
    written = [at for at, line in enumerate(lines[:end]) if "pwrite64" in line and "-wal>" in line]
    assert any("sync(" in line and "-wal>" in line for line in lines[written[-1] : end])
