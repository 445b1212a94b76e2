"""`syncd init --rotate` with real daemons: the key changes, and nothing else does."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from ends import End, Ends, processes_of
from waiting import eventually

from protocol.errors import ConfigError, ExitCode, RefusedError, UsageError
from protocol.messages import Hello, QueuedCommand, encode_messages
from protocol.paths import Layout
from protocol.queue import encode_script
from protocol.states import Result
from protocol.wire import Kind, ObjectName, Role, Sealer, Writer
from syncd.cli import main
from syncd.config import Key, read_key
from syncd.setup import initialise, rotate

STAGES = """
[stages.wait]
command = "echo $$ >> $SYNCD_STORE/pids; while [ ! -e $SYNCD_STORE/go ]; do sleep 0.05; done"
gpu = 0.5

[stages.quick]
command = "echo done"
gpu = 0.5

[stages.after]
command = "echo after"
after = ["wait"]
gpu = 0
"""


@pytest.fixture
def ends(local_ends: Ends) -> Ends:
    local_ends.serve(stages=STAGES)
    local_ends.new_vm()
    return local_ends


def key(end: End) -> Key:
    return read_key(end.layout.key)


def is_over(end: End) -> bool:
    return not key(end).previous


def problems(ends: Ends) -> str:
    path = ends.laptop.layout.problems
    return path.read_text() if path.exists() else ""


def sealed_by(folder: Path, by: Key) -> bool:
    """Whether the key of `by` opens every pack and state in a folder of the remote."""
    writer = Writer.parse(folder.name)
    assert writer is not None
    for path in folder.iterdir():
        name = ObjectName.parse(path.name)
        if name is None or name.kind is Kind.CHUNK:
            continue
        try:
            Sealer(folder=by.folder, key=by.secret).open(writer, name, path.read_bytes())
        except RefusedError:
            return False
    return True


def test_the_key_is_rotated_while_a_stage_runs_and_commands_wait(ends: Ends) -> None:
    ends.laptop.start()
    ends.vm.start()
    ends.append("run:wait", "run:after")
    ends.started(1)
    old = key(ends.laptop)

    told = rotate(ends.laptop.layout)
    assert "restart" in told
    assert "--key-file" in told
    assert "syncd bootstrap" in told
    assert "a `syncd watch` runs here" in told
    ends.laptop.kill()
    ends.laptop.start()
    ends.append("run:quick")
    status = ends.vm.layout.status
    eventually(
        lambda: "refused" in status.read_text() and "--rotate --key-file" in status.read_text(),
        within=30,
        what=lambda: ends.told(3),
    )
    eventually(lambda: "being rotated" in problems(ends), within=30)
    # What the worker still seals by the old key arrives.
    eventually(lambda: any("refused" in p for p in ends.status()["problems"]), within=30)

    rotate(ends.vm.layout, key_file=ends.laptop.layout.key)
    ends.vm.kill()
    ends.vm.start()
    assert ends.ended(3).result is Result.SUCCESS
    (ends.vm.layout.store / "go").touch()
    assert ends.ended(1).result is Result.SUCCESS
    assert ends.ended(2).result is Result.SUCCESS
    assert len((ends.vm.layout.store / "pids").read_text().split()) == 1

    for end in (ends.laptop, ends.vm):
        eventually(lambda end=end: is_over(end), within=30, what=lambda: ends.told(1))
        assert key(end).secret not in (old.secret, b"")
        assert key(end).folder == old.folder
    remote = ends.folder / "remote"
    for folder in (*remote.glob("c-*"), *remote.glob("w-*")):
        assert sealed_by(folder, key(ends.laptop))
    eventually(lambda: problems(ends).strip() == "[]", within=30, what=lambda: problems(ends))

    forge(ends, old)
    ends.append("run:quick")
    assert ends.ended(4).line == "run:quick"
    assert not (ends.vm.layout.root / "forged").exists()
    eventually(lambda: "refused" in status.read_text(), what=lambda: ends.told(4))


def forge(ends: Ends, old: Key) -> None:
    """Write, under the old key, what would run a command: as the controller, and as its heir."""
    by = Sealer(folder=old.folder, key=old.secret)
    remote = ends.folder / "remote"
    (folder,) = remote.glob("c-*")
    writer = Writer.parse(folder.name)
    assert writer is not None
    newest = max(int(path.name[:12]) for path in folder.iterdir())
    hello = Hello(host="evil", version="0", time=0.0)
    line = encode_script("touch forged")
    command = QueuedCommand(number=9, line=line, run_id="sh.0009.7f3a")
    heir = Writer(writer.epoch + 1, "ffffffff", Role.CONTROLLER)
    places = [(writer, newest + at) for at in (1, 2)]
    for by_writer, seq in [*places, (heir, 1)]:
        name, body = by.seal(by_writer, Kind.PACK, seq, encode_messages([hello, command]))
        (remote / str(by_writer)).mkdir(exist_ok=True)
        (remote / str(by_writer) / str(name)).write_bytes(body)


def test_a_fresh_vm_in_the_middle_of_a_rotation_takes_over(ends: Ends) -> None:
    ends.laptop.start()
    ends.vm.start()
    ends.append("run:quick", "run:wait")
    ends.ended(1)
    ends.started(2)
    rotate(ends.laptop.layout)
    ends.laptop.kill()
    ends.laptop.start()
    ends.append("run:after")
    eventually(lambda: "being rotated" in problems(ends), within=30)
    ends.lose_vm()
    ends.new_vm().start()
    (ends.vm.layout.store / "go").parent.mkdir(parents=True, exist_ok=True)
    (ends.vm.layout.store / "go").touch()
    assert ends.ended(3).result is Result.SUCCESS
    assert (ends.journal()[2].result, ends.journal()[2].attempt) == (Result.SUCCESS, 2)
    assert sum(r.number == 1 for r in ends.records()) == 3  # and never again
    for end in (ends.laptop, ends.vm):
        eventually(lambda end=end: is_over(end), within=60, what=lambda: ends.told(3))
    # From here on a machine that has the new key alone finds everything.
    ends.lose_vm()
    ends.new_vm().start()
    ends.append("run:after")
    assert ends.ended(4).result is Result.SUCCESS


@pytest.mark.long
@pytest.mark.parametrize("kill", ["laptop", "vm", "both"])
def test_daemons_that_are_killed_all_through_a_rotation_end_it(ends: Ends, kill: str) -> None:
    ends.laptop.start()
    ends.vm.start()
    ends.append("run:quick")
    ends.ended(1)
    rotate(ends.laptop.layout)
    rotate(ends.vm.layout, key_file=ends.laptop.layout.key)
    victims = {"laptop": [ends.laptop], "vm": [ends.vm], "both": [ends.laptop, ends.vm]}[kill]
    for end in (ends.laptop, ends.vm):
        end.kill()
        end.start()
    marks = iter(["pack", "state", "pack", "state"])
    for mark in marks:
        seen = len(list((ends.folder / "remote").glob(f"*/*-{mark}-*")))
        ends.append("run:quick")
        eventually(
            lambda mark=mark, seen=seen: (
                len(list((ends.folder / "remote").glob(f"*/*-{mark}-*"))) != seen
                or all(map(is_over, (ends.laptop, ends.vm)))
            ),
            within=30,
        )
        for end in victims:
            end.kill()
        for end in victims:
            end.start()
    for end in (ends.laptop, ends.vm):
        eventually(lambda end=end: is_over(end), within=60, what=lambda: ends.told(1))
    for number in range(1, 6):
        assert ends.ended(number).result is Result.SUCCESS


@pytest.mark.long
def test_a_worker_whose_key_is_in_the_environment_rotates_by_it(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends.laptop.start()
    ends.vm.start()
    ends.append("run:quick")
    ends.ended(1)
    rotate(ends.laptop.layout)
    ends.laptop.kill()
    ends.laptop.start()
    ends.vm.kill()
    ends.vm.layout.key.unlink()
    secret = ends.laptop.layout.key.read_text()
    ends.vm.environ["SYNCD_KEY"] = " ".join(secret.split())  # as a notebook's secret: one line
    ends.vm.start()
    ends.append("run:wait")
    ends.started(2)
    for pid in processes_of(ends.vm.layout):
        assert b"SYNCD_KEY=" not in Path(f"/proc/{pid}/environ").read_bytes()
    (ends.vm.layout.store / "go").touch()
    assert ends.ended(2).result is Result.SUCCESS
    eventually(lambda: is_over(ends.laptop), within=30, what=lambda: ends.told(2))
    assert not ends.vm.layout.key.exists()


# The command


@pytest.fixture
def laptop(tmp_path: Path) -> Layout:
    layout = Layout(tmp_path / "laptop")
    initialise(layout, role=Role.CONTROLLER, remote=str(tmp_path / "remote"))
    return layout


@pytest.fixture
def worker(tmp_path: Path, laptop: Layout) -> Layout:
    layout = Layout(tmp_path / "worker")
    initialise(layout, role=Role.WORKER, remote=str(tmp_path / "remote"), key_file=laptop.key)
    return layout


@pytest.fixture(autouse=True)
def no_key_around(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("SYNCD_KEY", raising=False)
    return


def test_a_rotated_key_names_the_same_folder_and_keeps_the_one_before(
    laptop: Layout, worker: Layout
) -> None:
    before = read_key(laptop.key)
    rotate(laptop)
    after = read_key(laptop.key)
    assert (after.folder, after.previous) == (before.folder, before.secret)
    assert after.secret != before.secret
    assert len(laptop.key.read_text().splitlines()) == 2
    assert laptop.key.stat().st_mode & 0o777 == 0o600
    rotate(worker, key_file=laptop.key)
    rotate(worker, key_file=laptop.key)
    assert read_key(worker.key) == after


def test_a_worker_that_comes_after_the_rotation_is_over_keeps_its_own_as_the_one_before(
    laptop: Layout, worker: Layout
) -> None:
    before = read_key(worker.key)
    rotate(laptop)
    new = read_key(laptop.key)
    laptop.key.write_text(new.text().splitlines()[0])
    rotate(worker, key_file=laptop.key)
    assert read_key(worker.key) == Key(before.folder, new.secret, before.secret)


def test_what_cannot_be_rotated_is_refused_and_the_key_stays(
    laptop: Layout, worker: Layout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = tmp_path / "old"
    old.write_text(read_key(laptop.key).text())
    other = tmp_path / "other"
    other.write_text(Key.new().text())
    rotate(laptop)
    kept = {layout: layout.key.read_bytes() for layout in (laptop, worker)}
    with pytest.raises(UsageError, match="a rotation is under way"):
        rotate(laptop)
    with pytest.raises(UsageError, match="it is the controller that makes a new key"):
        rotate(worker)
    with pytest.raises(UsageError, match="the key of another shared folder"):
        rotate(worker, key_file=other)
    with pytest.raises(UsageError, match="it is the key that was replaced"):
        rotate(laptop, key_file=old)
    with pytest.raises(ConfigError, match="No such file"):
        rotate(worker, key_file=tmp_path / "none")
    monkeypatch.setenv("SYNCD_KEY", old.read_text())
    with pytest.raises(UsageError, match=r"\$SYNCD_KEY is set"):
        rotate(laptop)
    monkeypatch.delenv("SYNCD_KEY")
    assert {layout: layout.key.read_bytes() for layout in kept} == kept
    unsealed = Layout(tmp_path / "unsealed")
    initialise(unsealed, role=Role.CONTROLLER, remote=str(tmp_path / "r"), unsealed=True)
    with pytest.raises(UsageError, match="there is no key"):
        rotate(unsealed)


def test_the_command_line_rotates_and_shows_no_key(
    laptop: Layout,
    worker: Layout,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def syncd(*words: str) -> int:
        return main(["init", "--rotate", *words])

    assert syncd("--folder", str(laptop.root)) == ExitCode.OK
    monkeypatch.setattr(sys, "stdin", io.StringIO(laptop.key.read_text()))
    assert syncd("--folder", str(worker.root), "--key-file", "-") == ExitCode.OK
    assert read_key(worker.key) == read_key(laptop.key)
    assert syncd("--folder", str(laptop.root), "--remote", "drive:x") == ExitCode.USAGE
    assert syncd("--folder", str(laptop.root)) == ExitCode.USAGE
    told = "".join(capsys.readouterr())
    assert "--rotate goes with" in told
    for line in laptop.key.read_text().split():
        assert line.rpartition(".")[2] not in told
