"""Power cuts while what was sent is put in place: growing files, files, payloads.

`tests/support/powercut.py` says what a power cut may leave; each check opens that with the code
that would find it, delivers what is still to come, and looks whether all is there, once.
"""

from __future__ import annotations

import functools
import hashlib
import stat
from pathlib import Path
from unittest.mock import patch

import pytest
from chunks import Chunks
from powercut_scenarios import (
    Scenario,
    assert_kept,
    assert_kept_after_kills,
    assert_needed,
    each_killed,
    each_sync,
)

from protocol.messages import Append, Content, FileEntry, PutFile
from protocol.snapshots import encode_snapshot
from syncd.delivery import joins as joins_module
from syncd.delivery import payload as payload_module
from syncd.delivery.contents import Contents
from syncd.delivery.joins import Joins
from syncd.delivery.payload import PayloadStore
from syncd.delivery.received import RemoteFiles
from syncd.log_parts import rotate, rotated
from syncd.state import State as Database

DATABASE = Path(".syncd") / "state.db"


def private(root):
    (root / ".syncd").mkdir()


def begun_log(root):
    """Start where a process is about to rename the log that it has written."""
    private(root)
    (root / "in").mkdir()
    (root / "in" / ".begun.tmp").write_bytes(LOG_PARTS[0].blob)


# Growing files

LOG = "in/pretrain.log"
CURVE = "in/artifacts/r/metrics.jsonl"


def segments(path, *streams_of_bytes):
    """Return messages that bring each stream's parts in turn, and what the file is in the end."""
    messages = []
    for number, parts in enumerate(streams_of_bytes):
        at = 0
        for part in parts:
            end = at + len(part)
            name = f"{number:016d}"
            messages.append(Append(path=path, stream=name, start=at, end=end, blob=part))
            at = end
    return messages


LOG_PARTS = segments(
    LOG, [b"first line\nsec", b"ond line\n", b"3\n"], [b"another worker\n", b"4\n"]
)
LOG_TEXT = b"first line\nsecond line\n3\nanother worker\n4\n"
CURVE_PARTS = segments(CURVE, [b'{"step": 1}\n', b'{"step": 2}\n{"st', b'ep": 3}\n'])
CURVE_TEXT = b'{"step": 1}\n{"step": 2}\n{"step": 3}\n'
ANEW_PARTS = [*CURVE_PARTS, *segments(CURVE, [], [b'{"step": 7}\n', b"\n"])]
ANEW_TEXT = b'{"step": 7}\n\n'


def join(messages, root, done, limit=64):
    """Apply messages in a transaction each, as packs are, from where the cursor is."""
    small = functools.partial(rotate, limit=limit)
    with patch.object(joins_module, "rotate", small):
        state = Database(root / DATABASE)
        joins = Joins(state, root)
        for number, message in enumerate(messages, start=1):
            with state.transaction():
                # In place of the packs' own cursor.
                if number > state.get("applied", 0):
                    joins.apply(message)
                    state.put("applied", number)
            done(str(number))
        state.close()


def old_curve(root):
    private(root)
    join(CURVE_PARTS, root, lambda what: None)


def join_after_a_kill(root, done):
    """The process renames the log, and is killed before it syncs the folder; another goes on."""
    if (root / "in" / ".begun.tmp").exists():
        (root / "in" / ".begun.tmp").rename(root / LOG)
    join(LOG_PARTS, root, done)


def check_joined(messages, text, root, done, limit=64):
    """What the cursor counts is not sent again: with the rest, the file is what was sent."""
    state = Database(root / DATABASE)
    assert state.get("applied", 0) >= (int(done[-1]) if done else 0)
    state.close()
    join(messages, root, lambda what: None, limit)
    path = root / messages[0].path
    before = rotated(path).read_bytes() if rotated(path).exists() else b""
    assert before + path.read_bytes() == text


# Files and contents

BLOB = b"what a run has made " * 4


def contents_at(root, state):
    return Contents(state, root / ".syncd" / "content", Chunks)


def put_over(root):
    (root / ".syncd" / "content").mkdir(parents=True)
    (root / "a").write_bytes(b"old")
    (root / "a").chmod(0o600)


def place(root, done):
    state = Database(root / DATABASE)
    contents = contents_at(root, state)
    sha256 = hashlib.sha256(BLOB).hexdigest()
    contents.receive(Content(sha256=sha256, size=len(BLOB), blob=BLOB))
    contents.place(sha256, root / "a", mode=0o755, size=len(BLOB))
    done("placed")
    state.close()


def check_placed(root, done):
    found = (root / "a").read_bytes(), stat.S_IMODE((root / "a").stat().st_mode)
    new, old = (BLOB, 0o755), (b"old", 0o600)
    assert found == new if done else found in (new, old)


def files_at(root, state):
    return RemoteFiles(state, root, contents_at(root, state), lambda path: True)


def content_folder(root):
    (root / ".syncd" / "content").mkdir(parents=True)


def fetch(root, done):
    (root / "in").mkdir(exist_ok=True)  # as one leaves it that was killed while it made folders
    state = Database(root / DATABASE)
    files = files_at(root, state)
    sha256 = hashlib.sha256(BLOB).hexdigest()
    if not files.paths():
        with state.transaction():
            files.apply(Content(sha256=sha256, size=len(BLOB), blob=BLOB))
            files.apply(PutFile(path=ARTIFACT, size=len(BLOB), mode=0o755, sha256=sha256))
    assert files.fetch(), files.problems
    done("fetched")
    state.close()


ARTIFACT = "in/artifacts/r/model"


def check_fetched(root, done):
    state = Database(root / DATABASE)
    files = files_at(root, state)
    assert not done or files.paths()
    if files.paths():
        if not done:
            assert files.fetch(), files.problems
        assert files.missing() == []
        assert (root / ARTIFACT).read_bytes() == BLOB
        assert (root / ARTIFACT).stat().st_mode & 0o777 == 0o755
    state.close()


# Payloads

PAYLOADS = [
    {"stages.toml": b"[stages.a]\ncommand = 'true'\n", "lib/a.sh": b"#!/bin/sh\n"},
    {"stages.toml": b"[stages.b]\ncommand = 'true'\n"},
]


def payload_at(root, state):
    return PayloadStore(state, root, root / ".syncd" / "payload", contents_at(root, state))


def payload_folders(root):
    content_folder(root)
    (root / ".syncd" / "payload").mkdir()


def unpack(root, done):
    state = Database(root / DATABASE)
    store = payload_at(root, state)
    for order, payload in enumerate(PAYLOADS, start=1):
        entries = []
        with state.transaction():
            if order <= state.get("applied", 0):  # in place of the packs' cursor
                continue
            state.put("applied", order)
            for path, data in payload.items():
                sha256 = hashlib.sha256(data).hexdigest()
                store.apply(Content(sha256=sha256, size=len(data), blob=data), ())
                mode = 0o755 if path.endswith(".sh") else 0o644
                entries.append(FileEntry(path=path, size=len(data), mode=mode, sha256=sha256))
            store.apply(encode_snapshot(order, entries), ())
        store.unpack(())
        assert not store.problem
        done(str(order))
    store.unpack(())
    done(str(len(PAYLOADS)))
    state.close()


# Where the payloads are unpacked, before they are renamed.
BUILT = [
    ".syncd/payload/.000001-21a4ec3c0fbec3da.tmp",
    ".syncd/payload/.000002-d62d2a763020d31a.tmp",
]


def unpack_many(root, done):
    with patch.object(payload_module, "FEW_FILES", -1):
        unpack(root, done)


def check_unpacked(root, done):
    state = Database(root / DATABASE)
    store = payload_at(root, state)
    promised = int(done[-1]) if done else 0
    newest = store.newest(promised)
    assert newest is not None or not promised
    for order, payload in enumerate(PAYLOADS, start=1):
        ready = store.exactly(order)
        assert ready is None or files_below(ready.folder) == payload
    store.unpack(())
    if promised:
        assert files_below(root / "serve") in PAYLOADS[promised - 1 :]
    state.close()


def files_below(folder):
    """Return the files below a folder; those that have to be programs are."""
    files = {str(p.relative_to(folder)): p for p in folder.rglob("*") if p.is_file()}
    assert all(path.stat().st_mode & 0o100 for path in files.values() if path.suffix == ".sh")
    return {name: path.read_bytes() for name, path in files.items()}


SCENARIOS = [
    Scenario(
        name="log put together",
        start=private,
        act=functools.partial(join, LOG_PARTS),
        check=functools.partial(check_joined, LOG_PARTS, LOG_TEXT),
        syncs=[
            "./ by Joins._append, make_dirs",
            "in/.pretrain.log.tmp by Joins._append, publish_bytes",
            "in by Joins._append, publish_bytes",
            "in/pretrain.log by Joins._append",
        ],
    ),
    Scenario(
        name="log that a killed process began",
        start=begun_log,
        act=join_after_a_kill,
        check=functools.partial(check_joined, LOG_PARTS, LOG_TEXT),
        syncs=[
            "in/pretrain.log by Joins._append",
            "in by Joins._append, fsync_dir",
        ],
    ),
    Scenario(
        name="log put together and rotated",
        start=private,
        act=functools.partial(join, LOG_PARTS, limit=20),
        check=functools.partial(check_joined, LOG_PARTS, LOG_TEXT, limit=20),
        syncs=[
            "./ by Joins._append, make_dirs",
            "in/.pretrain.log.tmp by Joins._append, publish_bytes",
            "in by Joins._append, publish_bytes",
            "in/pretrain.log by Joins._append",
            "in by rotate, rename_durable",
        ],
        spare=["in by Joins._append, fsync_dir"],
    ),
    Scenario(
        name="curve put together",
        start=private,
        act=functools.partial(join, CURVE_PARTS),
        check=functools.partial(check_joined, CURVE_PARTS, CURVE_TEXT),
        syncs=[
            "./ by Joins._append, make_dirs",
            "in by Joins._append, make_dirs",
            "in/artifacts by Joins._append, make_dirs",
            "in/artifacts/r/.metrics.jsonl.tmp by Joins._append, publish_bytes",
            "in/artifacts/r by Joins._append, publish_bytes",
            "in/artifacts/r/metrics.jsonl by Joins._append",
        ],
    ),
    Scenario(
        name="curve that begins anew",
        start=old_curve,
        act=functools.partial(join, ANEW_PARTS),
        check=functools.partial(check_joined, ANEW_PARTS, ANEW_TEXT),
        syncs=[
            "in/artifacts/r/metrics.jsonl by Joins._append",
            "in/artifacts/r by Joins._append, fsync_dir",
        ],
        spare=["in/artifacts/r by Joins._append, fsync_dir"],
    ),
    Scenario(
        name="content placed",
        start=put_over,
        act=place,
        check=check_placed,
        syncs=[
            ".a.tmp by Contents.place, publishing",
            "./ by Contents.place, publishing",
        ],
    ),
    Scenario(
        name="file fetched",
        start=content_folder,
        act=fetch,
        check=check_fetched,
        syncs=[
            "./ by RemoteFiles._place, make_dirs",
            "in by RemoteFiles._place, make_dirs",
            "in/artifacts by RemoteFiles._place, make_dirs",
            "in/artifacts/r/.model.tmp by Contents.place, publishing",
            "in/artifacts/r by Contents.place, publishing",
        ],
    ),
    Scenario(
        name="payload of many files unpacked",
        start=payload_folders,
        act=unpack_many,
        check=check_unpacked,
        syncs=[
            "everything by sync_disks",
            ".syncd/payload by PayloadStore._unpack, fsync_dir",
        ],
    ),
    Scenario(
        name="payload unpacked",
        start=payload_folders,
        act=unpack,
        check=check_unpacked,
        syncs=[
            f"{BUILT[0]}/lib/a.sh by _make_durable",
            f"{BUILT[0]}/stages.toml by _make_durable",
            f"{BUILT[0]} by _make_durable, fsync_dir",
            f"{BUILT[0]}/lib by _make_durable, fsync_dir",
            ".syncd/payload by PayloadStore._unpack, fsync_dir",
            f"{BUILT[1]}/stages.toml by _make_durable",
            f"{BUILT[1]} by _make_durable, fsync_dir",
        ],
    ),
]
# Each opens many a database: in the long form, but for one.
LONG = {scenario.name for scenario in SCENARIOS} - {"content placed"}


@pytest.mark.parametrize("scenario", SCENARIOS, ids=str)
def test_a_power_cut_at_any_moment_breaks_no_promise(scenario, tmp_path):
    assert_kept(scenario, tmp_path)


@each_sync(SCENARIOS)
def test_without_this_sync_some_power_cut_breaks_a_promise(scenario, sync, tmp_path):
    assert_needed(scenario, sync, tmp_path)


@each_killed(SCENARIOS, long=LONG)
def test_a_kill_and_a_restart_before_the_power_cut_break_no_promise(scenario, tmp_path):
    assert_kept_after_kills(scenario, tmp_path)
