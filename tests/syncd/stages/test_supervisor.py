"""The supervisor's process: what it starts, waits for, ends and records."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from protocol.logs import LogEnd, LogStart, parse_log_line
from protocol.states import Result
from syncd.platform import Identity
from syncd.stages.attempt import attempt_dir, prepare, request_stop
from syncd.stages.attempt_files import AttemptSpec, StageStart, read_file, take_lock
from syncd.stages.causes import ExitRecord, StopReason
from syncd.stages.orphans import remains

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the worker runs on Linux")

RUN_ID = "pretrain.0001.7f3a"


def wait_for(condition: Callable[[], Any], seconds: float = 20.0) -> Any:
    """Wait until `condition` returns something true, and return that."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)
    return value


def make(tmp_path: Path, command: str | tuple[str, ...], **more: Any) -> Path:
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
    return prepare(tmp_path / "runs" / RUN_ID, AttemptSpec(command=command, **fields))


def python(script: str) -> tuple[str, ...]:
    return (sys.executable, "-c", script)


@contextmanager
def supervisor(folder: Path, **environ: str) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "syncd.stages.supervisor", str(folder)],
        env={**os.environ, **environ},
        start_new_session=True,
    )
    try:
        yield process
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
        for left in remains(folder):
            left.signal(signal.SIGKILL)


def record(folder: Path) -> ExitRecord:
    found = read_file(folder / "exit.json", ExitRecord)
    assert found is not None
    return found


def run(tmp_path: Path, command: str | tuple[str, ...], **more: Any) -> tuple[ExitRecord, bytes]:
    """Run a command under a supervisor to its end; return the record and the log's own part."""
    folder = make(tmp_path, command, **more)
    with supervisor(folder):
        pass
    log = (tmp_path / "pretrain.log").read_bytes()
    first, _, rest = log.partition(b"\n")
    output, _, last = rest[:-1].rpartition(b"\n")
    assert isinstance(parse_log_line(first), LogStart)
    end = parse_log_line(last if output or last else rest)
    assert isinstance(end, LogEnd)
    assert (end.result, end.cause) == (record(folder).result, record(folder).cause)
    assert remains(folder) == []
    return record(folder), output


def pids(path: Path, count: int) -> list[int]:
    def written() -> list[int] | None:
        found = [int(line) for line in path.read_text().split()] if path.exists() else []
        return found if len(found) == count else None

    found: list[int] = wait_for(written)
    return found


def gone(pid: int) -> bool:
    process = Identity.of(pid)
    return process is None or not process.alive()


@pytest.mark.parametrize("code", [0, 1, 3, 255])
def test_the_exit_code_is_recorded(tmp_path: Path, code: int) -> None:
    before = time.time()
    ended, output = run(tmp_path, f"exit {code}")
    assert ended.exit_code == code
    assert ended.signal is None
    assert ended.result is (Result.FAILED if code else Result.SUCCESS)
    assert ended.cause == f"exit {code}"
    assert output == b""
    assert ended.started is not None
    assert before <= ended.started <= ended.ended <= time.time()


def test_a_command_may_be_a_list_of_arguments(tmp_path: Path) -> None:
    script = "import sys; print(sys.argv[1:], end='')"
    ended, output = run(tmp_path, (*python(script), "a b", "$x"))
    assert ended.result is Result.SUCCESS
    assert output == b"['a b', '$x']"


def test_output_arrives_byte_for_byte_from_both_streams(tmp_path: Path) -> None:
    script = "import os; os.write(1, bytes(range(256))); os.write(2, b'\\xff\\xfe')"
    _, output = run(tmp_path, python(script))
    assert output == bytes(range(256)) + b"\xff\xfe"


def test_a_flood_of_output_is_all_there(tmp_path: Path) -> None:
    script = "import sys\nfor i in range(500_000): sys.stdout.write(f'line {i} of many\\n')"
    ended, output = run(tmp_path, python(script))
    assert ended.result is Result.SUCCESS
    assert output + b"\n" == b"".join(b"line %d of many\n" % i for i in range(500_000))


def test_output_is_in_the_log_while_the_stage_runs(tmp_path: Path) -> None:
    script = "import time; print('here', end=''); time.sleep(600)"
    folder = make(tmp_path, python(script))
    log = tmp_path / "pretrain.log"
    with supervisor(folder):
        wait_for(lambda: log.exists() and log.read_bytes().endswith(b"here"))
        request_stop(folder, StopReason.STOPPED)


def test_a_log_is_appended_over_attempts(tmp_path: Path) -> None:
    for attempt in (1, 2):
        folder = make(tmp_path, f"printf {attempt}", attempt=attempt)
        with supervisor(folder):
            pass
    lines = (tmp_path / "pretrain.log").read_bytes().splitlines()
    kinds = [parse_log_line(line) for line in lines]
    assert [type(kind) for kind in kinds] == [LogStart, type(None), LogEnd] * 2
    assert [kind.attempt for kind in kinds if kind] == [1, 1, 2, 2]


def test_the_stage_gets_its_environment_and_not_the_key(tmp_path: Path) -> None:
    names = ("GIVEN", "INHERITED", "PYTHONUNBUFFERED", "SYNCD_KEY")
    script = f"import os; print([os.environ.get(n) for n in {names}], os.getcwd(), end='')"
    folder = make(tmp_path, python(script), environ={"GIVEN": "a\nb", "SYNCD_KEY": "k"})
    with supervisor(folder, INHERITED="yes", SYNCD_KEY="secret"):
        pass
    log = (tmp_path / "pretrain.log").read_text()
    assert f"['a\\nb', 'yes', '1', None] {tmp_path}\n" in log


def test_the_stage_starts_with_clean_signals_and_descriptors(tmp_path: Path) -> None:
    script = """
import os, signal
for line in open("/proc/self/status"):
    if line.startswith(("SigBlk", "SigIgn")): print(line.split()[1])
print(signal.getsignal(signal.SIGINT) is signal.default_int_handler, os.getsid(0) == os.getpid())
print(sorted(os.readlink(f"/proc/self/fd/{n}") for n in (0, 1, 2)))
links = {n: f"/proc/self/fd/{n}" for n in range(3, 100)}
print([os.path.basename(os.readlink(p)) for p in links.values() if os.path.lexists(p)])
"""
    _, output = run(tmp_path, python(script))
    log = str(tmp_path / "pretrain.log")
    blocked, ignored, *rest = output.decode().splitlines()
    assert int(blocked, 16) == 0
    # libc keeps two signals (32 and 33) for itself, which nobody can set back.
    valid = sum(1 << number - 1 for number in signal.valid_signals())
    # CPython itself ignores these two.
    assert int(ignored, 16) & valid == 1 << signal.SIGPIPE - 1 | 1 << signal.SIGXFSZ - 1
    assert rest == ["True True", str(sorted(["/dev/null", log, log])), "['lock']"]


def test_a_signal_is_recorded_by_name(tmp_path: Path) -> None:
    ended, _ = run(tmp_path, "kill -SEGV $$")
    assert (ended.result, ended.cause, ended.signal) == (Result.KILLED, "SIGSEGV", 11)
    assert ended.exit_code is None


def test_a_stage_killed_from_outside_is_killed(tmp_path: Path) -> None:
    folder = make(tmp_path, "echo $$ > pid; sleep 600")
    with supervisor(folder):
        (pid,) = pids(tmp_path / "pid", 1)
        os.kill(pid, signal.SIGKILL)
    assert record(folder).result is Result.KILLED
    assert record(folder).signal == signal.SIGKILL


def test_a_command_that_does_not_exist_failed_by_the_shells_word(tmp_path: Path) -> None:
    ended, _ = run(tmp_path, "no-such-program-anywhere")
    assert ended.result is Result.FAILED
    assert ended.cause.startswith("command not found (exit 127)")


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        ({"command": ("no-such-program",)}, "cannot run no-such-program: No such file"),
        ({"command": ("/",)}, "cannot run /: Permission denied"),
        ({"command": ("true", "x" * 3_000_000)}, "cannot run true: Argument list too long"),
        ({"cwd": "/no/such/folder"}, "cannot enter its folder /no/such/folder: No such file"),
    ],
)
def test_what_cannot_be_started_failed_to_spawn(
    tmp_path: Path, change: dict[str, Any], cause: str
) -> None:
    ended, _ = run(tmp_path, **{"command": "true", **change})
    assert ended.result is Result.FAILED_TO_SPAWN
    assert ended.cause.startswith(cause)
    assert ended.exit_code is None


@pytest.mark.parametrize(
    "damage", [lambda text: text[: len(text) // 2], lambda text: "", lambda text: "[]"]
)
def test_a_spec_cut_short_failed_to_spawn(tmp_path: Path, damage: Callable[[str], str]) -> None:
    folder = make(tmp_path, "touch ran")
    (folder / "spec.json").write_text(damage((folder / "spec.json").read_text()))
    with supervisor(folder):
        pass
    ended = record(folder)
    assert (ended.run_id, ended.attempt) == (RUN_ID, 1)
    assert ended.result is Result.FAILED_TO_SPAWN
    assert "spec.json" in ended.cause
    assert not (tmp_path / "ran").exists()


def test_a_log_that_cannot_be_opened_failed_to_spawn(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    folder = make(tmp_path, "touch ran", log=str(tmp_path / "file" / "x.log"))
    with supervisor(folder):
        pass
    assert record(folder).result is Result.FAILED_TO_SPAWN
    assert not (tmp_path / "ran").exists()


def test_a_timeout_ends_the_stage(tmp_path: Path) -> None:
    ended, _ = run(tmp_path, "sleep 600", timeout=0.3)
    assert (ended.result, ended.cause) == (Result.TIMED_OUT, "timed out after 0.3 s")
    assert ended.signal == signal.SIGTERM


def test_a_stage_may_end_politely_within_the_grace(tmp_path: Path) -> None:
    folder = make(tmp_path, "trap 'echo saved; exit 0' TERM; echo up; while :; do sleep 0.05; done")
    log = tmp_path / "pretrain.log"
    with supervisor(folder):
        wait_for(lambda: log.exists() and b"up\n" in log.read_bytes())
        request_stop(folder, StopReason.STOPPED)
    assert b"saved\n" in log.read_bytes()
    assert (record(folder).result, record(folder).cause) == (Result.STOPPED, "stopped")
    assert record(folder).exit_code == 0


def test_a_stage_that_ignores_sigterm_is_killed_after_the_grace(tmp_path: Path) -> None:
    folder = make(tmp_path, "trap '' TERM; echo $$ > pid; while :; do sleep 0.05; done", grace=0.3)
    with supervisor(folder):
        pids(tmp_path / "pid", 1)
        request_stop(folder, StopReason.STOPPED)
    ended = record(folder)
    assert (ended.result, ended.cause) == (Result.STOPPED, "stopped; it had to be killed")
    assert ended.signal == signal.SIGKILL


def test_a_suspended_stage_can_be_stopped(tmp_path: Path) -> None:
    folder = make(tmp_path, "echo $$ > pid; kill -STOP $$; sleep 600", grace=60.0)
    with supervisor(folder):
        (pid,) = pids(tmp_path / "pid", 1)
        wait_for(lambda: " T " in Path(f"/proc/{pid}/stat").read_text())
        request_stop(folder, StopReason.STOPPED)
    assert record(folder).signal == signal.SIGTERM


DAEMONISE = "(setsid sh -c 'echo $$ >> pids; exec sleep 600' &)"


def test_a_grandchild_in_a_session_of_its_own_is_stopped_too(tmp_path: Path) -> None:
    folder = make(tmp_path, f"{DAEMONISE}; {DAEMONISE}; exec sleep 600")
    with supervisor(folder):
        started = pids(tmp_path / "pids", 2)
        request_stop(folder, StopReason.STOPPED)
    assert all(gone(pid) for pid in started)


def test_what_outlives_the_stage_is_ended_and_named_in_the_log(tmp_path: Path) -> None:
    command = f"{DAEMONISE}; while ! test -s pids; do sleep 0.01; done; exit 4"
    ended, output = run(tmp_path, command)
    (pid,) = pids(tmp_path / "pids", 1)
    assert gone(pid)
    assert ended.exit_code == 4
    assert f"[syncd] the stage has ended; ending what it left: {pid}" in output.decode()


def test_a_leftover_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    leftover = "(trap '' TERM; setsid sh -c 'echo $$ > pids; sleep 600; sleep 600' &)"
    command = f"{leftover}; while ! test -s pids; do sleep 0.01; done"
    ended, _ = run(tmp_path, command, grace=0.3)
    assert gone(pids(tmp_path / "pids", 1)[0])
    assert ended.result is Result.SUCCESS


def test_a_stop_request_made_before_the_spawn_keeps_the_stage_from_starting(tmp_path: Path) -> None:
    folder = make(tmp_path, "touch ran")
    request_stop(folder, StopReason.FENCED)
    with supervisor(folder):
        pass
    ended = record(folder)
    assert ended.result is Result.STOPPED
    assert ended.cause == "fenced: another worker has taken over before it started"
    assert ended.started is None
    assert not (tmp_path / "ran").exists()


def test_a_stop_file_alone_is_noticed_without_a_signal(tmp_path: Path) -> None:
    folder = make(tmp_path, "echo $$ > pid; exec sleep 600")
    with supervisor(folder):
        pids(tmp_path / "pid", 1)
        (folder / "stop.json").write_text("half a requ")
    assert record(folder).result is Result.STOPPED


def test_a_sigterm_with_no_request_is_a_shutdown_to_be_resumed_from(tmp_path: Path) -> None:
    folder = make(tmp_path, "echo $$ > pid; exec sleep 600")
    with supervisor(folder) as process:
        (pid,) = pids(tmp_path / "pid", 1)
        process.terminate()
    assert gone(pid)
    assert record(folder).result is Result.KILLED
    assert record(folder).cause == "its supervisor was sent SIGTERM"


def test_interrupts_and_hangups_leave_it_alone(tmp_path: Path) -> None:
    folder = make(tmp_path, "echo $$ > pid; while ! test -e go; do sleep 0.02; done")
    with supervisor(folder) as process:
        pids(tmp_path / "pid", 1)
        os.killpg(process.pid, signal.SIGINT)
        os.killpg(process.pid, signal.SIGHUP)
        (tmp_path / "go").touch()
    assert record(folder).result is Result.SUCCESS


def test_a_disk_full_is_the_cause(tmp_path: Path) -> None:
    ended, _ = run(tmp_path, python("f = open('/dev/full', 'w'); f.write('x'); f.close()"))
    assert ended.result is Result.FAILED
    assert ended.cause.startswith("disk full (exit 1): OSError: [Errno 28] No space left")


def test_only_this_attempts_output_is_judged(tmp_path: Path) -> None:
    (tmp_path / "pretrain.log").write_bytes(b"MemoryError\n")
    folder = make(tmp_path, "exit 2")
    with supervisor(folder):
        pass
    assert record(folder).cause == "exit 2"


def test_a_record_stays_as_it_is(tmp_path: Path) -> None:
    folder = make(tmp_path, "echo ran >> ran")
    for _ in range(2):
        with supervisor(folder):
            pass
    assert (tmp_path / "ran").read_text() == "ran\n"


def test_a_held_lock_sends_it_away(tmp_path: Path) -> None:
    folder = make(tmp_path, "touch ran")
    lock = take_lock(folder.parent / "lock", patience=0)
    assert lock is not None
    try:
        command = [sys.executable, "-m", "syncd.stages.supervisor", str(folder)]
        assert subprocess.run(command, check=False).returncode == 7
    finally:
        os.close(lock)
    assert not (folder / "supervisor.json").exists()
    assert not (tmp_path / "ran").exists()


def test_a_command_is_started_at_most_once_an_attempt(tmp_path: Path) -> None:
    folder = make(tmp_path, "touch ran")
    start = StageStart(identity=Identity(4_000_000, "1", "another boot"), time=5.0)
    (folder / "stage.json").write_text(json.dumps(start, default=vars))
    with supervisor(folder):
        pass
    ended = record(folder)
    assert (ended.result, ended.started) == (Result.KILLED, 5.0)
    assert not (tmp_path / "ran").exists()


def test_it_is_small(tmp_path: Path) -> None:
    folder = make(tmp_path, "echo $$ > pid; exec sleep 600")
    with supervisor(folder) as process:
        pids(tmp_path / "pid", 1)
        status = Path(f"/proc/{process.pid}/status").read_text()
        (rss,) = (int(line.split()[1]) for line in status.splitlines() if "VmRSS" in line)
        assert rss < 25 * 1024
        request_stop(folder, StopReason.STOPPED)


@pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("unshare"), reason="needs root, to mount a small disk"
)
def test_an_end_on_a_full_disk_is_recorded(tmp_path: Path) -> None:
    """The whole of it on a tmpfs of 1 MB, in a mount namespace of its own."""
    folder = attempt_dir(tmp_path / "runs" / RUN_ID, 1)
    script = f"""
set -e
mount -t tmpfs -o size=1m none {tmp_path}
mkdir -p {folder}
cat > {folder}/spec.json
{sys.executable} -m syncd.stages.supervisor {folder}
cat {folder}/exit.json
"""
    spec = AttemptSpec(
        run_id=RUN_ID,
        stage="pretrain",
        attempt=1,
        line="run:pretrain",
        command="cat /dev/zero > fill",
        cwd=str(tmp_path),
        log=str(tmp_path / "pretrain.log"),
    )
    command = ["unshare", "--mount", "sh", "-c", script]
    text = json.dumps(spec.to_json())
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    if "mount" in done.stderr or "unshare" in done.stderr:
        pytest.skip(f"no mount namespace here: {done.stderr.strip()}")
    ended = json.loads(done.stdout)
    assert ended["result"] == "failed"
    assert ended["cause"].startswith("disk full (exit 1)")


# What it says of the attempt before


def test_a_log_says_that_the_attempt_before_was_cut_off(tmp_path: Path) -> None:
    folder = make(tmp_path, "true", attempt=2, cut_off="VM gone: w-1\nlast line: loss 0.3")
    with supervisor(folder):
        pass
    told, start = (tmp_path / "pretrain.log").read_bytes().splitlines()[:2]
    assert (
        told
        == f"[syncd] {RUN_ID} attempt 1 was cut off: VM gone: w-1\\nlast line: loss 0.3".encode()
    )
    assert isinstance(parse_log_line(start), LogStart)


# Fencing


def fence(tmp_path: Path, content: str = '{"by": "w-000002-51b0c7de", "time": 1.0}') -> None:
    (tmp_path / "fenced.json").write_text(content)


FENCED = "fenced: w-000002-51b0c7de has taken over"


def test_a_supervisor_finds_by_itself_that_its_worker_was_fenced(tmp_path: Path) -> None:
    command = f"{DAEMONISE}; echo $$ > pid; exec sleep 600"
    folder = make(tmp_path, command, fence=str(tmp_path / "fenced.json"))
    with supervisor(folder):
        started = pids(tmp_path / "pid", 1) + pids(tmp_path / "pids", 1)
        fence(tmp_path)
    assert (record(folder).result, record(folder).cause) == (Result.STOPPED, FENCED)
    assert all(gone(pid) for pid in started)
    assert not (folder / "stop.json").exists()


def test_nothing_is_started_behind_a_fence(tmp_path: Path) -> None:
    fence(tmp_path)
    ended, _ = run(tmp_path, "touch ran", fence=str(tmp_path / "fenced.json"))
    assert (ended.result, ended.cause) == (Result.STOPPED, f"{FENCED} before it started")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("content", ["", "{", "[]", '{"by": 3}', '{"by": ""}'])
def test_a_fence_counts_whatever_it_says(tmp_path: Path, content: str) -> None:
    fence(tmp_path, content)
    ended, _ = run(tmp_path, "touch ran", fence=str(tmp_path / "fenced.json"))
    assert ended.cause == "fenced: another worker has taken over before it started"


def test_an_orphan_behind_a_fence_is_ended_as_fenced(tmp_path: Path) -> None:
    folder = make(tmp_path, "echo $$ > pid; exec sleep 600", fence=str(tmp_path / "fenced.json"))
    kill_the_supervisor_of(folder, tmp_path)
    fence(tmp_path)
    with supervisor(folder):
        pass
    assert record(folder).cause == f"{FENCED}; its supervisor had died"
    assert remains(folder) == []


# Ends of whole trees


def kill_the_supervisor_of(folder: Path, tmp_path: Path) -> int:
    """Start an attempt that writes its pid to `pid`, and kill its supervisor; return the pid."""
    command = [sys.executable, "-P", "-m", "syncd.stages.supervisor", str(folder)]
    with subprocess.Popen(command, start_new_session=True) as process:
        (pid,) = pids(tmp_path / "pid", 1)
        process.kill()
    return pid


def test_a_supervisor_killed_in_the_middle_of_a_stop_is_followed_by_one_that_finishes_it(
    tmp_path: Path,
) -> None:
    ignoring = "trap 'echo asked >> asked' TERM; echo $$ > pid; while :; do sleep 0.05; done"
    folder = make(tmp_path, f"{DAEMONISE}; {ignoring}", grace=600.0)
    command = [sys.executable, "-P", "-m", "syncd.stages.supervisor", str(folder)]
    with subprocess.Popen(command, start_new_session=True) as process:
        (pid,) = pids(tmp_path / "pid", 1)
        (runaway,) = pids(tmp_path / "pids", 1)
        request_stop(folder, StopReason.STOPPED)
        wait_for((tmp_path / "asked").exists)
        process.kill()
    assert not gone(pid)
    spec = json.loads((folder / "spec.json").read_text())
    (folder / "spec.json").write_text(json.dumps({**spec, "grace": 0.3}))
    with supervisor(folder):
        pass
    assert (record(folder).result, record(folder).cause) == (
        Result.STOPPED,
        "stopped; its supervisor had died",
    )
    assert gone(pid)
    assert gone(runaway)


FORKS_WHILE_IT_IS_KILLED = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: None)
open("pids", "a").write(f"{os.getpid()}\\n")
while True:
    if os.fork():
        time.sleep(0.005)
        os._exit(0)
    os.setsid()
"""


def test_a_stage_that_forks_while_it_is_being_killed_is_killed_all_the_same(tmp_path: Path) -> None:
    # It hops: each process lives for milliseconds, in a session of its own, and ignores SIGTERM.
    hopping = f"{sys.executable} -c '{FORKS_WHILE_IT_IS_KILLED}' & exec sleep 600"
    folder = make(tmp_path, hopping, grace=0.2)
    with supervisor(folder):
        pids(tmp_path / "pids", 1)
        request_stop(folder, StopReason.STOPPED)
    assert record(folder).result is Result.STOPPED
    assert remains(folder) == []


def test_a_tree_of_every_kind_is_ended_whole(tmp_path: Path) -> None:
    kinds = """
note() { echo $(exec sh -c 'echo $PPID') >> pids; }
(trap '' TERM; note; while :; do sleep 0.05; done) &
(note; kill -STOP $(exec sh -c 'echo $PPID'); sleep 600) &
(setsid sh -c 'echo $$ >> pids; exec sleep 600' &) &
(setsid sh -c '(setsid sh -c "echo \\$\\$ >> pids; exec sleep 600" &); exit' &)
env -i sh -c 'echo $$ >> pids; exec sleep 600' &
wait
"""
    folder = make(tmp_path, kinds, grace=0.5)
    with supervisor(folder):
        started = pids(tmp_path / "pids", 5)
        request_stop(folder, StopReason.STOPPED)
    assert [pid for pid in started if not gone(pid)] == []


# GPU memory, by a stand-in for nvidia-smi that prints what the real one prints

NVIDIA_SMI = """#!/bin/sh
# A stand-in: what the real one prints, of one GPU whose use stands in a file.
case "$1" in
*query-gpu*) echo "0, GPU-5e1f, $(cat {folder}/used)" ;;
*query-compute-apps*) cat {folder}/processes ;;
esac
"""


@pytest.fixture
def gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with a GPU: its folder holds `used` (MiB), and `processes`, as they are listed."""
    folder = tmp_path / "gpu"
    folder.mkdir()
    program = folder / "nvidia-smi"
    program.write_text(NVIDIA_SMI.format(folder=folder))
    program.chmod(0o755)
    (folder / "used").write_text("4\n")
    (folder / "processes").write_text("")
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return folder


LEAKS = "echo 1233 > gpu/used; echo 'GPU-5e1f, 4194304, 1229' > gpu/processes"


def test_memory_that_a_gpu_gets_back_is_waited_for(tmp_path: Path, gpu: Path) -> None:
    once_more = f"*query-compute-apps*) test -s {gpu}/processes && echo 4 > {gpu}/used;"
    script = gpu / "nvidia-smi"
    script.write_text(script.read_text().replace("*query-compute-apps*)", once_more))
    ended, _ = run(tmp_path, LEAKS, gpu=1.0)
    assert ended.cause == "exit 0"
    assert (gpu / "used").read_text() == "4\n"


def supervise(folder: Path, **limits: float) -> None:
    """Supervise an attempt with other limits of patience with the GPUs."""
    code = f"from syncd.stages import gpu_memory, supervisor; vars(gpu_memory).update({limits!r})"
    code += f"; supervisor.main([{str(folder)!r}])"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_memory_that_a_gpu_still_holds_is_said(tmp_path: Path, gpu: Path) -> None:
    folder = make(tmp_path, f"{LEAKS}; exit 3", gpu=0.5)
    supervise(folder, FREE_SECONDS=0.0)
    said = "exit 3; GPU 0 still holds 1.2 GiB (process 4194304)"
    assert (record(folder).result, record(folder).cause) == (Result.FAILED, said)
    assert f"failed ({said})\n" in (tmp_path / "pretrain.log").read_text()


def test_what_may_be_the_memory_of_another_living_run_is_not_said(
    tmp_path: Path, gpu: Path
) -> None:
    mark = f"SYNCD_SUPERVISED={tmp_path}/runs/other.0002.7f3a/attempt-1"
    other = subprocess.Popen(["env", mark, "sleep", "600"])
    try:
        folder = make(tmp_path, LEAKS, gpu=0.5)
        wait_for(lambda: mark.encode() in Path(f"/proc/{other.pid}/environ").read_bytes())
        supervise(folder, FREE_SECONDS=0.0)
    finally:
        other.kill()
        other.wait()
    assert record(folder).cause == "exit 0"


def test_a_run_that_takes_no_share_of_the_gpu_is_not_asked_about_it(
    tmp_path: Path, gpu: Path
) -> None:
    ended, _ = run(tmp_path, LEAKS, gpu=0.0)
    assert ended.cause == "exit 0"


def test_a_gpu_that_does_not_answer_holds_nobody_up(tmp_path: Path, gpu: Path) -> None:
    (gpu / "nvidia-smi").write_text("#!/bin/sh\nexec sleep 600\n")
    folder = make(tmp_path, "exit 0", gpu=1.0)
    supervise(folder, ANSWER_SECONDS=0.2)
    assert record(folder).cause == "exit 0"
