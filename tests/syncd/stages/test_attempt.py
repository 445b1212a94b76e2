"""The daemon's side of an attempt, with real supervisors, and daemons killed at bad moments."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from protocol.errors import BusyError, DataError, ExitCode, RunFailedError, UsageError
from protocol.logs import LogEnd, parse_log_line
from protocol.states import Result
from syncd.platform import Identity, boot_id
from syncd.stages import attempt, process_tree
from syncd.stages.attempt import (
    Ended,
    NeverStarted,
    Orphaned,
    Running,
    Vanished,
    observe,
    prepare,
    request_stop,
    spawn,
)
from syncd.stages.attempt_files import (
    AttemptSpec,
    StageStart,
    read_file,
    read_spec,
    stop_requested,
    take_lock,
)
from syncd.stages.causes import StopReason
from syncd.stages.orphans import remains
from syncd.stages.process_tree import descendants, end_processes

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the worker runs on Linux")

RUN_ID = "pretrain.0001.7f3a"
UNTIL_GO = "echo $$ >> pids; while ! test -e go; do sleep 0.02; done"
RUN_AWAY = "(setsid sh -c 'echo $$ >> runaways; exec sleep 600' &)"


def wait_for(condition: Callable[[], Any], seconds: float = 20.0) -> Any:
    """Wait until `condition` returns something true, and return that."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)
    return value


def spec(tmp_path: Path, command: str | tuple[str, ...] = "true", **more: Any) -> AttemptSpec:
    fields = {
        "run_id": RUN_ID,
        "stage": "pretrain",
        "attempt": 1,
        "line": "run:pretrain",
        "cwd": str(tmp_path),
        "log": str(tmp_path / "pretrain.log"),
        "grace": 5.0,
        **more,
    }
    return AttemptSpec(command=command, **fields)


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Path]]:
    """Prepare attempts; whatever of them is alive at the end is killed."""
    made: list[Path] = []

    def prepared(command: str | tuple[str, ...], **more: Any) -> Path:
        folder = prepare(tmp_path / "runs" / RUN_ID, spec(tmp_path, command, **more))
        made.append(folder)
        return folder

    yield prepared
    for folder in made:
        supervisor = read_file(folder / "supervisor.json", Identity)
        for process in [supervisor, *remains(folder)]:
            if process is not None:
                process.signal(signal.SIGKILL)
                wait_for(partial(dead, process))
        observe(folder)  # reaps the supervisor


def pids(path: Path, count: int = 1) -> list[int]:
    def written() -> list[int] | None:
        found = [int(line) for line in path.read_text().split()] if path.exists() else []
        return found if len(found) == count else None

    found: list[int] = wait_for(written)
    return found


def ended(folder: Path) -> Any:
    def record() -> Any:
        now = observe(folder)
        return now.record if isinstance(now, Ended) else None

    return wait_for(record)


def dead(process: Identity | None) -> bool:
    return process is None or not process.alive()


def gone(pid: int) -> bool:
    return dead(Identity.of(pid))


def kill_supervisor(folder: Path) -> None:
    supervisor = read_file(folder / "supervisor.json", Identity)
    assert supervisor is not None
    assert supervisor.signal(signal.SIGKILL)
    wait_for(lambda: not supervisor.alive())


def daemon(code: str, **more: Any) -> subprocess.Popen[bytes]:
    """Start a process that runs `code`, as a daemon would, with this module's names."""
    names = "from syncd.stages.attempt import *\nfrom syncd.stages.attempt_files import *"
    program = f"import os, signal\nfrom pathlib import Path\n{names}\n{code}"
    return subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, **more)


def test_an_attempt_runs_and_ends(make: Callable[..., Path], tmp_path: Path) -> None:
    folder = make(f"{UNTIL_GO}; exit 3")
    assert observe(folder) == NeverStarted()
    now = spawn(folder)
    assert isinstance(now, Running)
    assert observe(folder) == now
    pids(tmp_path / "pids")
    (tmp_path / "go").touch()
    assert ended(folder).exit_code == 3
    assert spawn(folder) == observe(folder)


def test_the_daemon_is_left_without_zombies(make: Callable[..., Path]) -> None:
    for number in range(1, 4):
        folder = make("true", attempt=number)
        spawn(folder)
        ended(folder)
        supervisor = read_file(folder / "supervisor.json", Identity)
        assert supervisor is not None
        assert Identity.of(supervisor.pid) != supervisor


def test_the_state_folders_are_private(make: Callable[..., Path]) -> None:
    folder = make("true")
    spawn(folder)
    ended(folder)
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {f.stat().st_mode & 0o777 for f in folder.iterdir()} == {0o600}


def test_an_attempts_spec_never_changes(make: Callable[..., Path]) -> None:
    folder = make("true")
    assert make("false") == folder
    assert read_spec(folder).command == "true"


def test_two_spawns_at_once_make_one_stage(make: Callable[..., Path], tmp_path: Path) -> None:
    folder = make(UNTIL_GO)
    code = f"print(type(spawn(Path({str(folder)!r}))).__name__)"
    spawners = [daemon(code) for _ in range(3)]
    assert [s.communicate(timeout=30)[0] for s in spawners] == [b"Running\n"] * 3
    (pid,) = pids(tmp_path / "pids")
    (tmp_path / "go").touch()
    assert ended(folder).result is Result.SUCCESS
    assert pids(tmp_path / "pids") == [pid]


def test_a_daemon_killed_right_after_the_spawn_loses_nothing(
    make: Callable[..., Path], tmp_path: Path
) -> None:
    folder = make(f"echo first; {UNTIL_GO}; echo last; exit 7")
    code = f"spawn(Path({str(folder)!r})); os.kill(os.getpid(), 9)"
    killed = daemon(code)
    assert killed.communicate()[0] == b""
    assert killed.returncode == -signal.SIGKILL
    assert isinstance(observe(folder), Running)
    (tmp_path / "go").touch()
    assert ended(folder).exit_code == 7
    lines = (tmp_path / "pretrain.log").read_bytes().splitlines()
    assert lines[1:-1] == [b"first", b"last"]
    end = parse_log_line(lines[-1])
    assert isinstance(end, LogEnd)
    assert end.cause == "exit 7; last line: last"


def test_a_daemon_killed_before_its_supervisor_reports_loses_nothing(
    make: Callable[..., Path],
) -> None:
    folder = make("exit 5")
    daemon(
        "from syncd.stages.attempt import _spawn_detached\n"
        f"_spawn_detached(Path({str(folder)!r})); os.kill(os.getpid(), 9)"
    ).communicate()
    spawn(folder)
    assert ended(folder).exit_code == 5


def test_an_interrupt_of_the_daemons_group_leaves_the_stage_alone(
    make: Callable[..., Path], tmp_path: Path
) -> None:
    folder = make(UNTIL_GO)
    code = f"spawn(Path({str(folder)!r})); signal.pause()"
    with daemon(code, start_new_session=True, stderr=subprocess.DEVNULL) as interrupted:
        pids(tmp_path / "pids")
        os.killpg(interrupted.pid, signal.SIGINT)
        assert interrupted.wait(30) != 0
    (tmp_path / "go").touch()
    assert ended(folder).result is Result.SUCCESS


def test_a_stage_outlives_its_supervisor_and_is_killed_as_an_orphan(
    make: Callable[..., Path], tmp_path: Path
) -> None:
    folder = make(f"{RUN_AWAY}; printf 'half a line'; {UNTIL_GO}")
    spawn(folder)
    (pid,), (runaway,) = pids(tmp_path / "pids"), pids(tmp_path / "runaways")
    kill_supervisor(folder)
    now = observe(folder)
    assert isinstance(now, Orphaned)
    assert {pid, runaway} <= {process.pid for process in now.processes}
    record = ended_by_spawning_again(folder)
    cause = "its supervisor died; last line: half a line"
    assert (record.result, record.cause) == (Result.KILLED, cause)
    assert gone(pid)
    assert gone(runaway)
    assert observe(folder) == spawn(folder) == Ended(record)
    log = (tmp_path / "pretrain.log").read_bytes()
    assert b"half a line\n[syncd] end" in log


def test_a_daemonised_process_that_lost_all_its_parents_is_an_orphan_still(
    make: Callable[..., Path], tmp_path: Path
) -> None:
    # Python closes the lock's descriptor in its children: the lock alone does not show this one.
    script = """
import os, subprocess, time
child = subprocess.Popen(["sleep", "600"], start_new_session=True)
for name, pid in (("runaways", child.pid), ("pids", os.getpid())):
    print(pid, file=open(name, "w"))
time.sleep(600)
"""
    folder = make((sys.executable, "-c", script))
    spawn(folder)
    (pid,), (runaway,) = pids(tmp_path / "pids"), pids(tmp_path / "runaways")
    kill_supervisor(folder)
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: gone(pid))
    with pytest.raises(BusyError, match="still alive"):
        spawn(make("touch second", attempt=2))
    ended_by_spawning_again(folder)
    assert gone(runaway)
    assert not (tmp_path / "second").exists()
    spawn(tmp_path / "runs" / RUN_ID / "attempt-2")
    wait_for((tmp_path / "second").exists)


def test_an_orphan_that_ignores_sigterm_is_killed(
    make: Callable[..., Path], tmp_path: Path
) -> None:
    folder = make(f"trap '' TERM; {UNTIL_GO}", grace=0.2)
    spawn(folder)
    (pid,) = pids(tmp_path / "pids")
    kill_supervisor(folder)
    ended_by_spawning_again(folder)
    assert gone(pid)


def test_nobody_waits_for_the_end_of_an_orphan(make: Callable[..., Path], tmp_path: Path) -> None:
    folder = make(f"trap '' TERM; {UNTIL_GO}", grace=600.0)
    spawn(folder)
    (pid,) = pids(tmp_path / "pids")
    for _ in range(2):  # the one that took over dies, too
        kill_supervisor(folder)
        assert isinstance(observe(folder), Orphaned)
        assert isinstance(spawn(folder), Running)
        assert not gone(pid)
    (tmp_path / "go").touch()
    assert ended(folder).result is Result.KILLED


def test_a_second_attempt_cannot_start_beside_an_orphan(
    make: Callable[..., Path], tmp_path: Path
) -> None:
    folder = make(UNTIL_GO)
    spawn(folder)
    pids(tmp_path / "pids")
    kill_supervisor(folder)
    with pytest.raises(BusyError, match="still alive"):
        spawn(make("touch second", attempt=2))
    assert isinstance(observe(folder), Orphaned)
    assert not (tmp_path / "second").exists()


def test_a_stop_asked_of_an_orphan_is_its_cause(make: Callable[..., Path], tmp_path: Path) -> None:
    folder = make(UNTIL_GO)
    spawn(folder)
    pids(tmp_path / "pids")
    kill_supervisor(folder)
    request_stop(folder, StopReason.STOPPED)
    record = ended_by_spawning_again(folder)
    assert (record.result, record.cause) == (Result.STOPPED, "stopped; its supervisor had died")


def test_all_killed_at_once_has_vanished(make: Callable[..., Path], tmp_path: Path) -> None:
    folder = make(UNTIL_GO)
    spawn(folder)
    (pid,) = pids(tmp_path / "pids")
    kill_supervisor(folder)
    for process in remains(folder):
        process.signal(signal.SIGKILL)
    wait_for(lambda: not remains(folder))
    assert observe(folder) == Vanished(started=True)
    assert ended_by_spawning_again(folder).cause == "its supervisor died"
    assert pids(tmp_path / "pids") == [pid]


def ended_by_spawning_again(folder: Path) -> Any:
    spawn(folder)
    return ended(folder)


def test_a_supervisor_killed_before_the_stage_started_can_be_spawned_again(
    make: Callable[..., Path],
) -> None:
    folder = make("exit 6")
    dead = Identity(4_000_000, "1", boot_id())
    (folder / "supervisor.json").write_text(json.dumps(vars(dead)))
    assert observe(folder) == Vanished(started=False)
    assert ended_by_spawning_again(folder).exit_code == 6


CRASHING_SUPERVISOR = """
import sys
from syncd.stages import exits, supervisor

publish = supervisor.publish_json

def publish_or_die(path, value, **more):
    if path.name == {name!r} and {moment!r} == "before": os.kill(os.getpid(), signal.SIGKILL)
    publish(path, value, **more)
    if path.name == {name!r}: os.kill(os.getpid(), signal.SIGKILL)

exits.publish_json = supervisor.publish_json = publish_or_die
supervisor.main([{folder!r}])
"""


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("name", ["supervisor.json", "stage.json", "exit.json"])
def test_a_supervisor_killed_at_any_step_runs_the_command_at_most_once(
    make: Callable[..., Path], tmp_path: Path, name: str, moment: str
) -> None:
    folder = make("echo ran >> ran")
    crashing = CRASHING_SUPERVISOR.format(name=name, moment=moment, folder=str(folder))
    killed = daemon(crashing)
    killed.communicate(timeout=30)
    assert killed.returncode == -signal.SIGKILL
    # The stage's process, told nothing, ends by itself.
    wait_for(lambda: not remains(folder))
    recorded = (folder / "stage.json").exists()
    ran = (tmp_path / "ran").exists()
    assert ran == (name == "exit.json")
    if (name, moment) == ("exit.json", "after"):
        assert isinstance(observe(folder), Ended)
    elif (name, moment) != ("supervisor.json", "before"):
        assert observe(folder) == Vanished(started=recorded)
    record = ended_by_spawning_again(folder)
    assert (record.result is Result.SUCCESS) == (not recorded or (moment == "after" and ran))
    assert (tmp_path / "ran").exists() == (ran or not recorded)
    if (tmp_path / "ran").exists():
        assert (tmp_path / "ran").read_text() == "ran\n"


def test_after_a_reboot_the_machine_is_the_cause(make: Callable[..., Path]) -> None:
    folder = make("true")
    before = Identity(os.getpid(), "1", "another boot")
    start = StageStart(identity=before, time=5.0)
    (folder / "supervisor.json").write_text(json.dumps(vars(before)))
    (folder / "stage.json").write_text(json.dumps(start, default=vars))
    assert observe(folder) == Vanished(started=True)
    record = ended_by_spawning_again(folder)
    assert (record.result, record.cause) == (Result.KILLED, "the machine was restarted")
    assert record.started == 5.0


def test_a_process_id_that_was_used_again_is_never_signalled(make: Callable[..., Path]) -> None:
    folder = make("true")
    with subprocess.Popen(["sleep", "600"]) as bystander:
        used_again = Identity(bystander.pid, "1", boot_id())
        start = StageStart(identity=used_again, time=5.0)
        (folder / "supervisor.json").write_text(json.dumps(vars(used_again)))
        (folder / "stage.json").write_text(json.dumps(start, default=vars))
        request_stop(folder, StopReason.STOPPED)
        assert remains(folder) == []
        assert descendants([Identity(os.getpid(), "1", boot_id())]) == []
        ended_by_spawning_again(folder)
        assert bystander.poll() is None
        bystander.kill()


def test_a_running_attempt_is_no_orphan(make: Callable[..., Path], tmp_path: Path) -> None:
    folder = make(UNTIL_GO)
    running = spawn(folder)
    pids(tmp_path / "pids")
    command = [sys.executable, "-m", "syncd.stages.supervisor", str(folder)]
    assert subprocess.run(command, check=False).returncode == ExitCode.BUSY
    assert spawn(folder) == observe(folder) == running
    (tmp_path / "go").touch()
    assert ended(folder).result is Result.SUCCESS


def test_a_stop_reaches_a_running_stage_at_once(make: Callable[..., Path], tmp_path: Path) -> None:
    folder = make(UNTIL_GO)
    spawn(folder)
    pids(tmp_path / "pids")
    request_stop(folder, StopReason.STOPPED)
    assert ended(folder).result is Result.STOPPED


def test_a_stop_while_it_starts_is_not_missed(make: Callable[..., Path], tmp_path: Path) -> None:
    folder = make(UNTIL_GO)
    attempt._spawn_detached(folder)
    request_stop(folder, StopReason.STOPPED)
    assert ended(folder).result is Result.STOPPED


def test_a_stop_before_the_spawn_starts_nothing(make: Callable[..., Path], tmp_path: Path) -> None:
    folder = make("touch ran")
    request_stop(folder, StopReason.STOPPED)
    spawn(folder)
    assert ended(folder).cause == "stopped before it started"
    assert not (tmp_path / "ran").exists()


def test_the_first_stop_request_stays(make: Callable[..., Path]) -> None:
    folder = make("true")
    request_stop(folder, StopReason.FENCED)
    request_stop(folder, StopReason.STOPPED)
    assert stop_requested(folder) is StopReason.FENCED


def test_a_stop_after_the_end_changes_nothing(make: Callable[..., Path]) -> None:
    folder = make("true")
    spawn(folder)
    record = ended(folder)
    request_stop(folder, StopReason.STOPPED)
    assert ended(folder) == record
    assert stop_requested(folder) is None


def test_what_a_daemon_left_that_was_killed_while_it_prepared_an_attempt_is_removed(tmp_path):
    folder = prepare(tmp_path / RUN_ID, spec(tmp_path))
    (folder / "spec.json").rename(folder / ".spec.json.0123456789ab.tmp")
    prepare(tmp_path / RUN_ID, spec(tmp_path))
    assert [path.name for path in folder.iterdir()] == ["spec.json"]


def test_a_supervisor_that_fails_is_reported_with_its_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = prepare(tmp_path / RUN_ID, spec(tmp_path))
    (folder / "supervisor.json").mkdir()
    (folder / "supervisor.json" / "x").touch()
    monkeypatch.setattr(attempt, "observe", lambda _: NeverStarted())
    with pytest.raises(RunFailedError, match=r"supervisor\.log.*exit code 1: .*directory"):
        spawn(folder)


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    folder = prepare(tmp_path / RUN_ID, spec(tmp_path))
    (folder / "supervisor.json").write_text('{"pid": 1')
    with pytest.raises(DataError, match=r"supervisor\.json"):
        observe(folder)


def test_a_spec_survives_its_file(tmp_path: Path) -> None:
    for command in ("a 'b'", ("a", "b c")):
        written = spec(tmp_path, command, environ={"A": "ü\n"}, timeout=2)
        assert AttemptSpec.from_json(json.loads(json.dumps(written.to_json()))) == written


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"attempt": 0}, "attempt is 0, and must be 1 or more"),
        ({"command": " "}, "command is ' ', and must be a program"),
        ({"command": ()}, r"command is \(\), and must be a program"),
        ({"command": "a\0b"}, "without NUL"),
        ({"environ": {"A=": "b"}}, "environ is .* names and values"),
        ({"cwd": "here"}, "cwd is 'here', and must be an absolute path"),
        ({"log": "x.log"}, "log is 'x.log', and must be an absolute path"),
        ({"timeout": 0}, "timeout is 0, and must be seconds above 0"),
        ({"grace": -1}, "grace is -1, and must be seconds, 0 or more"),
        ({"fence": "f"}, "fence is 'f', and must be an absolute path, or empty"),
    ],
)
def test_a_spec_that_cannot_run_is_refused(
    tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        spec(tmp_path, **change)


@pytest.mark.parametrize("command", [None, 3, ["a", 3], {"a": "b"}])
def test_a_command_that_is_neither_text_nor_words_is_refused(tmp_path: Path, command: Any) -> None:
    with pytest.raises(ValueError, match="command"):
        AttemptSpec.from_json({**spec(tmp_path).to_json(), "command": command})


def test_a_process_that_survives_sigkill_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_tree, "KILL_PATIENCE", 0.05)
    immortal = Identity(4_000_000, "1", boot_id())
    with pytest.raises(BusyError, match="alive after SIGKILL: 4000000"):
        end_processes(lambda: [immortal], 0.05, time.sleep)


def test_a_lock_is_had_by_one(tmp_path: Path) -> None:
    first = take_lock(tmp_path / "lock", patience=0)
    assert first is not None
    assert take_lock(tmp_path / "lock", patience=0.02) is None
    os.close(first)
    second = take_lock(tmp_path / "lock", patience=0)
    assert second is not None
    os.close(second)
