"""What hostile bytes, a hostile peer, and a curious user of the same machine get from both ends.

The daemons are real, the remote is a local folder. A hostile peer is one that has the key: all that
it says is sealed.
"""

from __future__ import annotations

import base64
import hashlib
import os
import secrets
import stat
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import pytest
from ends import End, Ends, processes_of
from waiting import eventually

from protocol.errors import ExitCode
from protocol.journal import JournalRecord
from protocol.messages import (
    Append,
    Content,
    DropFile,
    FileEntry,
    Hello,
    Journal,
    Message,
    PutFile,
    QueuedCommand,
    RunEnded,
    Snapshot,
    StatusReport,
    encode_messages,
)
from protocol.queue import encode_script
from protocol.results import RunRecord
from protocol.snapshots import encode_snapshot
from protocol.states import Result, State
from protocol.status import Status
from protocol.wire import Kind, ObjectName, Role, Sealer, Writer
from syncd.config import read_key, sealer

STAGES = """
[stages.hello]
command = "env; echo hello; sleep 0.2"
gpu = 0
"""
RUN = "hello.0001.7f3a"
BAD_PATHS = [
    "/etc/cron.d/evil",
    "../evil",
    "in/artifacts/../../../evil",
    "in/artifacts//evil",
    "in/artifacts/./evil",
    "in/artifacts/a\nb",
    "in/artifacts/\x1b[31mred",
    "in/artifacts/con",
    "in/artifacts/COM1.txt",
    "in/artifacts/lpt¹.log",
    "in/artifacts/c:\\evil",
    "in/artifacts/a:stream",
    "in/artifacts/ends in a dot.",
    "in/artifacts/" + "x" * 256,
    "in/artifacts/a\0b",
    "",
]
OUT_OF_PLACE = [".syncd/key", "queue.txt", "syncd.toml", "serve/stages.toml", "in/journal.jsonl"]


class Peer:
    """A peer with the key, that says what it likes in the place of a daemon."""

    def __init__(self, ends: Ends, role: Role, epoch: int = 1) -> None:
        self.remote = ends.folder / "remote"
        self.writer = Writer(epoch, secrets.token_hex(4), role)
        self.sealer = sealer(read_key(ends.laptop.layout.key))
        self.seq = 0
        self.say(Hello(host="peer", version="0", time=0.0))

    def say(self, *messages: Message) -> None:
        """Send one pack."""
        self.seq += 1
        self.put(self.sealer, Kind.PACK, self.seq, encode_messages(messages))

    def put(self, by: Sealer, kind: Kind, seq: int, payload: bytes) -> ObjectName:
        folder = self.remote / str(self.writer)
        folder.mkdir(exist_ok=True)
        name, body = by.seal(self.writer, kind, seq, payload)
        part = folder / f"{name}.partial"
        part.write_bytes(body)
        part.rename(folder / str(name))
        return name


def content(data: bytes) -> Content:
    return Content(sha256=hashlib.sha256(data).hexdigest(), size=len(data), blob=data)


def put_file(path: str, data: bytes, **change: int) -> PutFile:
    given = {"size": len(data), "mode": 0o644, **change}
    return PutFile(path=path, sha256=hashlib.sha256(data).hexdigest(), **given)


def append(path: str, data: bytes) -> Append:
    return Append(path=path, stream="s", start=0, end=len(data), blob=data)


def snapshot(order: int, *paths: str, data: bytes = b"echo evil\n") -> Snapshot:
    sha256 = hashlib.sha256(data).hexdigest()
    return encode_snapshot(
        order, [FileEntry(path=p, size=len(data), mode=0o6777, sha256=sha256) for p in paths]
    )


def text_of(path: Path) -> str:
    """What a file says that a daemon may not have written yet."""
    return path.read_text() if path.exists() else ""


# A worker that sends what it must not


def test_a_hostile_workers_paths_are_refused_by_name_and_the_rest_goes_on(
    local_ends: Ends, tmp_path: Path
) -> None:
    ends = local_ends
    inbox = ends.laptop.layout.inbox
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "victim.log").write_bytes(b"mine\n")
    inbox.joinpath("artifacts").mkdir(parents=True)
    inbox.joinpath("artifacts", "link").symlink_to(outside)
    inbox.joinpath("linked.log").symlink_to(outside / "victim.log")
    inbox.joinpath("artifacts", "pipe.log").parent.mkdir(exist_ok=True)
    os.mkfifo(inbox / "artifacts" / "pipe.log")
    (inbox / "artifacts" / "folder.log").mkdir()
    before = {
        path: path.read_bytes() for path in (ends.laptop.layout.key, ends.laptop.layout.queue)
    }
    ends.laptop.start()
    peer = Peer(ends, Role.WORKER)
    data = b"evil\n"
    refused: list[Message] = []
    for path in [*BAD_PATHS, *OUT_OF_PLACE]:
        refused += [put_file(path, data), append(path, data), DropFile(path=path)]
    links = ["in/linked.log", "in/artifacts/link/a.log", "in/artifacts/pipe.log"]
    folders = ["in/artifacts/folder.log", "in/artifacts/file/below.log"]
    refused += [append(path, data) for path in (*links, *folders)]
    peer.say(content(data), put_file("in/artifacts/file", data))
    eventually((inbox / "artifacts" / "file").exists, what=lambda: ends.told(1))
    for message in refused:
        peer.say(content(data), message)
    peer.say(put_file("in/artifacts/link/b", data), put_file("in/artifacts/folder.log", data))
    peer.say(put_file("in/artifacts/large", data, size=2), content(data))
    good = put_file("in/artifacts/good", data, mode=0o6777)
    peer.say(content(data), good, append("in/hello.log", b"a line\n"))
    eventually((inbox / "artifacts" / "good").exists, within=30, what=lambda: ends.told(1))
    eventually(lambda: ends.log("hello") == b"a line\n", what=lambda: ends.told(1))

    told = ends.laptop.layout.problems
    expected = f"{len(refused)} objects were refused"
    eventually(lambda: expected in text_of(told), what=lambda: text_of(told))
    for named in ("in/artifacts/link/b", "in/artifacts/large"):
        eventually(lambda named=named: named in text_of(told), what=lambda: text_of(told))
    assert stat.S_IMODE((inbox / "artifacts" / "good").stat().st_mode) == 0o777
    assert {path: path.read_bytes() for path in before} == before
    assert {p.name for p in outside.iterdir()} == {"victim.log"}
    assert (outside / "victim.log").read_bytes() == b"mine\n"
    assert not list(tmp_path.rglob("*evil*"))
    assert "evil" not in ends.laptop.layout.queue.read_text()
    output = ends.laptop.output.read_text()
    assert "\x1b" not in output
    assert "cron.d" in output  # refused by name
    shown = subprocess.run(
        [sys.executable, "-m", "syncd", "status", "-C", str(ends.laptop.layout.root)],
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    assert expected in shown


def test_what_a_hostile_worker_says_of_runs_is_refused_and_the_rest_goes_on(
    local_ends: Ends,
) -> None:
    ends = local_ends
    ends.laptop.start()
    peer = Peer(ends, Role.WORKER)
    record = {"number": 1, "line": "run:hello", "state": State.CLAIMED, "time": 1.0}
    worker = str(peer.writer)
    run = {"stage": "hello", "line": "run:hello", "result": Result.SUCCESS}
    refused: list[Message] = [
        Journal(record=JournalRecord(**record, worker=worker, run_id="../../evil")),
        Journal(record=JournalRecord(**record, worker=worker, run_id="hello.0002.7f3a")),
        Journal(record=JournalRecord(**record, worker="zzz")),
        Journal(record=JournalRecord(**record, worker="c-000001-00000000")),
        RunEnded(record=RunRecord(run_id="../evil", **run)),
        RunEnded(record=RunRecord(run_id="gate.0001.7f3a", **run)),
        RunEnded(record=RunRecord(run_id="hello.1.7f3a", **run)),
        StatusReport(status={"time": "now"}),
    ]
    good = Status(time=1.0, worker=worker, host="\x1b[31mred", sealed=True)
    peer.say(StatusReport(status=asdict(good)))
    for message in refused:
        peer.say(message)
    peer.say(RunEnded(record=RunRecord(run_id=RUN, **run)))
    peer.say(Journal(record=JournalRecord(**record, worker=worker, run_id=RUN)))
    eventually(lambda: 1 in ends.journal(), within=30, what=lambda: ends.told(1))
    assert list(ends.results().runs) == [RUN]
    told = ends.laptop.layout.problems
    expected = f"{len(refused)} objects were refused"
    eventually(lambda: expected in text_of(told), what=lambda: text_of(told))
    text = text_of(ends.laptop.layout.status)
    assert worker in text
    assert "\x1b" not in text


# A controller that sends what it must not


def test_a_hostile_controllers_snapshots_and_run_ids_are_refused_and_the_rest_goes_on(
    local_ends: Ends, tmp_path: Path
) -> None:
    ends = local_ends
    peer = Peer(ends, Role.CONTROLLER)
    ends.new_vm().start()
    data = b"echo evil\n"
    peer.say(content(data))
    order = 0
    for path in BAD_PATHS:
        order += 1
        peer.say(snapshot(order, "stages.toml", path))
    for paths in (["a", "a"], ["a", "a/b"]):
        order += 1
        peer.say(snapshot(order, *paths))
    forged = Snapshot(order=order + 1, id="../../../x", blob=b"[]")
    peer.say(forged)
    count = order + 1
    for number, run_id in enumerate(
        ["../../evil", "/evil", "hello.0099.7f3a", "gate.0004.7f3a", "hello.0005.7f3a.arm", ""],
        start=1,
    ):
        peer.say(QueuedCommand(number=number, line="run:hello", run_id=run_id, snapshot=0))
        count += 1
    stages = STAGES.encode()
    peer.say(content(stages), snapshot(50, "stages.toml", "sub/stages.toml", data=stages))
    peer.say(QueuedCommand(number=7, line="run:hello", run_id="hello.0007.7f3a", snapshot=50))
    status = ends.vm.layout.status
    log = ends.vm.layout.log("hello")
    eventually(
        lambda: log.exists() and b"success" in log.read_bytes(),
        within=30,
        what=lambda: ends.told(1),
    )
    expected = f"{count} objects were refused"
    eventually(lambda: expected in text_of(status), what=lambda: text_of(status))
    assert not list(tmp_path.rglob("*evil*"))
    assert [p.name for p in ends.vm.layout.runs.iterdir()] == ["hello.0007.7f3a"]
    (payload,) = (ends.vm.layout.private / "payload").iterdir()
    assert stat.S_IMODE((payload / "stages.toml").stat().st_mode) == 0o777
    assert "\x1b" not in ends.vm.output.read_text()


@pytest.mark.long
def test_a_hostile_predecessors_files_do_not_leave_a_fresh_workers_tree(
    local_ends: Ends, tmp_path: Path
) -> None:
    ends = local_ends
    peer = Peer(ends, Role.WORKER)
    data = b"evil\n"
    for path in [*BAD_PATHS, *OUT_OF_PLACE]:
        peer.say(content(data), put_file(path, data))
    record = {"number": 3, "line": "run:hello", "time": 1.0, "worker": str(peer.writer)}
    peer.say(
        Journal(record=JournalRecord(**record, state=State.STARTED, run_id="../evil", attempt=1))
    )
    peer.say(content(data), put_file("store/good", data))
    ends.serve(stages=STAGES)
    ends.laptop.start()
    ends.new_vm().start()
    ends.append("run:hello")
    assert ends.ended(1).result is Result.SUCCESS
    assert (ends.vm.layout.store / "good").read_bytes() == data
    assert not list(tmp_path.rglob("*evil*"))
    status = ends.vm.layout.status
    expected = f"{len(BAD_PATHS) + len(OUT_OF_PLACE) + 1} objects were refused"
    eventually(lambda: expected in text_of(status), what=lambda: text_of(status))


# Garbage, with no key


def test_garbage_on_the_remote_is_counted_shown_at_both_ends_and_in_nobodys_way(
    local_ends: Ends,
) -> None:
    ends = local_ends
    ends.serve(stages=STAGES)
    ends.laptop.start()
    ends.new_vm().start()
    ends.append("run:hello")
    ends.ended(1)
    remote = ends.folder / "remote"
    forger = Sealer(folder=read_key(ends.laptop.layout.key).folder, key=secrets.token_bytes(32))
    payload = encode_messages([Hello(host="evil", version="0", time=0.0)])
    for folder in (*remote.glob("c-*"), *remote.glob("w-*")):
        writer = Writer.parse(folder.name)
        assert writer is not None
        for at in range(20):
            for kind in Kind:
                name, body = forger.seal(writer, kind, 1000 + at, payload + b" " * at)
                (folder / str(name)).write_bytes(body)
        newer = Writer(writer.epoch + 7, "00000000", writer.role)
        (remote / str(newer)).mkdir()
        name, body = forger.seal(newer, Kind.PACK, 1, payload)
        (remote / str(newer) / str(name)).write_bytes(body)
        (folder / "not an object").write_bytes(b"\0" * 10)
    (remote / "queue.txt").write_text(f"{encode_script('touch evil')}\n")
    ends.append("run:hello")
    assert ends.ended(2).result is Result.SUCCESS
    told, status = ends.laptop.layout.problems, ends.vm.layout.status
    for path in (told, status):
        eventually(
            lambda path=path: "objects were refused" in text_of(path),
            within=30,
            what=lambda: ends.told(2),
        )
    eventually(lambda: any("refused" in p for p in ends.status()["problems"]), within=30)
    assert not (ends.vm.layout.root / "evil").exists()


# The key, and who may read what


def private_files(end: End) -> Iterator[tuple[Path, os.stat_result]]:
    """Files and folders of a daemon's own, but for those that it makes for stages."""
    private = end.layout.private
    yield private, private.lstat()
    for path in private.rglob("*"):
        found = path.lstat()
        # A socket is rclone's, and is as open as the folder that it lies in.
        of_others = path.name in ("report.json", "progress.json") or stat.S_ISSOCK(found.st_mode)
        below = path.relative_to(private).parts
        if not of_others and not (below[0] == "payload" and len(below) > 1):
            yield path, found


def test_what_a_daemon_keeps_is_for_its_user_alone_and_the_key_is_nowhere_else(
    local_ends: Ends, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = local_ends
    ends.serve(stages=STAGES + '[stages.wait]\ncommand = "env; exec sleep 100"\ngpu = 0\n')
    ends.new_vm()
    key = read_key(ends.laptop.layout.key)
    # Where a notebook has it: in the daemon's environment, which stages must not be given.
    ends.vm.environ["SYNCD_KEY"] = key.text()
    before = os.umask(0)
    try:
        ends.laptop.start()
        ends.vm.start()
    finally:
        os.umask(before)
    ends.append("run:hello", "run:wait")
    ends.sh("env; cat /proc/$PPID/environ")
    ends.ended(1)
    ends.ended(3)
    ends.started(2)
    open_to_others = [
        f"{path} {stat.filemode(found.st_mode)}"
        for end in (ends.laptop, ends.vm)
        for path, found in private_files(end)
        if stat.S_IMODE(found.st_mode) & 0o077
    ]
    assert not open_to_others, "\n".join(open_to_others)
    forms = shown_forms(key.secret)
    pids = [*processes_of(ends.vm.layout), *rclones(ends)]
    assert len(pids) >= 4  # a supervisor, its stage, and an rclone at each end
    for pid in pids:
        for name in ("cmdline", "environ"):
            data = Path(f"/proc/{pid}/{name}").read_bytes()
            assert not [form for form in forms if form in data], (pid, name)
    for end in (ends.laptop, ends.vm):
        assert end.stop() == 0
    keys = {end.layout.key for end in (ends.laptop, ends.vm)}
    for path in tmp_path.rglob("*"):
        if path.is_file() and path not in keys:
            data = path.read_bytes()
            assert not [form for form in forms if form in data], path
        assert not [form for form in forms if form in os.fsencode(path)]


def shown_forms(secret: bytes) -> list[bytes]:
    """The key as it might stand somewhere."""
    return [
        secret,
        secret.hex().encode(),
        base64.b64encode(secret)[:40],
        base64.urlsafe_b64encode(secret)[:40],
        repr(secret)[2:-1].encode(),
    ]


def rclones(ends: Ends) -> Sequence[int]:
    """The process ids of both ends' rclone."""
    found = []
    for end in (ends.laptop, ends.vm):
        text = (end.layout.private / "rclone" / "rclone.pid").read_text()
        found.append(int(text.strip("[").partition(",")[0]))
    return found


def test_a_key_that_is_damaged_is_named_and_not_shown(local_ends: Ends) -> None:
    laptop = local_ends.laptop
    line = laptop.layout.key.read_bytes().strip()
    laptop.layout.key.write_bytes(line[:-4])
    laptop.start()
    assert laptop.wait() == ExitCode.CONFIG
    output = laptop.output.read_bytes()
    assert b".syncd/key" in output
    assert line.rpartition(b".")[2][:20] not in output
