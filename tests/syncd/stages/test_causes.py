"""From the facts of an end to its result and cause."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from protocol.logs import parse_log_line
from protocol.states import Result
from syncd.stages.causes import (
    MAX_QUOTE,
    ExitRecord,
    Facts,
    OomKills,
    StopReason,
    _group_files,
    full_folders,
    judge,
    signal_name,
    tail_lines,
)


@pytest.mark.parametrize(
    ("facts", "result", "cause"),
    [
        (Facts(exit_code=0), Result.SUCCESS, "exit 0"),
        (Facts(exit_code=3), Result.FAILED, "exit 3"),
        (
            Facts(exit_code=3, tail=b"a\nbad shape\n\n"),
            Result.FAILED,
            "exit 3; last line: bad shape",
        ),
        (Facts(exit_code=127), Result.FAILED, "command not found (exit 127)"),
        (Facts(exit_code=126), Result.FAILED, "command not executable (exit 126)"),
        (Facts(exit_code=143), Result.FAILED, "exit 143, as after SIGTERM"),
        (Facts(exit_code=255), Result.FAILED, "exit 255"),
        (Facts(signal=signal.SIGSEGV), Result.KILLED, "SIGSEGV"),
        (Facts(signal=signal.SIGKILL), Result.KILLED, "SIGKILL"),
        (
            Facts(spawn_error="cannot run x: gone", started=False),
            Result.FAILED_TO_SPAWN,
            "cannot run x: gone",
        ),
    ],
)
def test_an_end_has_a_result_and_a_cause(facts: Facts, result: Result, cause: str) -> None:
    assert judge(facts) == (result, cause)


@pytest.mark.parametrize(
    ("facts", "result", "cause"),
    [
        (Facts(stop=StopReason.STOPPED, signal=15), Result.STOPPED, "stopped"),
        (Facts(stop=StopReason.STOPPED, exit_code=0), Result.STOPPED, "stopped"),
        (
            Facts(stop=StopReason.STOPPED, signal=9, had_to_kill=True),
            Result.STOPPED,
            "stopped; it had to be killed",
        ),
        (
            Facts(stop=StopReason.TIMED_OUT, signal=15, timeout=3600),
            Result.TIMED_OUT,
            "timed out after 3600 s",
        ),
        (
            Facts(stop=StopReason.FENCED, exit_code=1),
            Result.STOPPED,
            "fenced: another worker has taken over",
        ),
        (
            Facts(stop=StopReason.STOPPED, started=False),
            Result.STOPPED,
            "stopped before it started",
        ),
        (
            Facts(stop=StopReason.FENCED, signal=15, fenced_by="w-000002-51b0c7de"),
            Result.STOPPED,
            "fenced: w-000002-51b0c7de has taken over",
        ),
        (Facts(stop=StopReason.STOPPED), Result.STOPPED, "stopped; its supervisor had died"),
        (
            Facts(stop=StopReason.TERMINATED, signal=15),
            Result.KILLED,
            "its supervisor was sent SIGTERM",
        ),
    ],
)
def test_what_we_ended_is_not_blamed_on_the_stage(facts: Facts, result: Result, cause: str) -> None:
    assert judge(facts) == (result, cause)


@pytest.mark.parametrize(
    ("facts", "cause"),
    [
        (Facts(), "its supervisor died"),
        (Facts(tail=b"epoch 1\nloss 3\n"), "its supervisor died; last line: loss 3"),
        (Facts(rebooted=True), "the machine was restarted"),
    ],
)
def test_an_end_that_nobody_saw_is_killed(facts: Facts, cause: str) -> None:
    assert judge(facts) == (Result.KILLED, cause)


def test_success_needs_exit_0_whatever_the_log_says() -> None:
    assert judge(Facts(exit_code=0, tail=b"MemoryError\n", full=("/x",)))[0] is Result.SUCCESS
    for code in range(1, 256):
        assert judge(Facts(exit_code=code))[0] is Result.FAILED


@pytest.mark.parametrize("how", [{"signal": 9}, {"exit_code": 137}])
def test_a_sigkill_with_the_kernels_word_is_out_of_memory(how: dict[str, int]) -> None:
    result, cause = judge(Facts(oom_kills=1, **how))  # type: ignore[arg-type]
    assert result is Result.KILLED
    assert cause.startswith("out of memory: the kernel killed it")


def test_a_sigkill_with_the_machines_word_is_likely_out_of_memory() -> None:
    result, cause = judge(Facts(signal=9, oom_kills=0, machine_oom_kills=2))
    assert result is Result.KILLED
    assert cause.startswith("likely out of memory")


def test_another_stages_out_of_memory_is_told_but_not_blamed() -> None:
    assert judge(Facts(exit_code=1, oom_kills=1)) == (
        Result.FAILED,
        "exit 1; the kernel killed 1 for memory meanwhile",
    )


@pytest.mark.parametrize(
    ("line", "label"),
    [
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB", "on the GPU"),
        ("torch.cuda.OutOfMemoryError: Tried", "out of memory on the GPU"),
        ("RuntimeError: CUDA error: out of memory", "out of memory on the GPU"),
        ("MemoryError", "out of memory"),
        ("terminate called after throwing an instance of 'std::bad_alloc'", "out of memory"),
        ("OSError: [Errno 28] No space left on device: 'x'", "disk full"),
        ("OSError: [Errno 122] Disk quota exceeded", "disk full"),
        ("RuntimeError: unable to allocate: insufficient shared memory (shm)", "shared memory"),
    ],
)
def test_what_the_program_confesses_is_the_cause(line: str, label: str) -> None:
    tail = f"epoch 1\n{line}\nException ignored in: <_io.TextIOWrapper>\n".encode()
    result, cause = judge(Facts(exit_code=1, tail=tail))
    assert result is Result.FAILED
    assert label in cause
    assert cause.endswith(f"(exit 1): {line}")


def test_the_confession_nearest_to_the_end_counts() -> None:
    tail = b"CUDA out of memory, retrying with a smaller batch\nOSError: No space left on device\n"
    assert judge(Facts(exit_code=1, tail=tail))[1].startswith("disk full")


def test_a_full_file_system_is_the_cause_of_a_silent_failure() -> None:
    result, cause = judge(Facts(exit_code=1, full=("/data",)))
    assert (result, cause) == (Result.FAILED, "disk full (exit 1): no space left under /data")


def test_a_cause_is_one_short_printable_line() -> None:
    _, cause = judge(Facts(exit_code=1, tail=b"\x1b[31m\xff" + b"x" * 10_000))
    assert cause.isprintable()
    assert len(cause) < MAX_QUOTE + 50


def test_the_tail_is_read_as_a_person_would_have_seen_it() -> None:
    assert tail_lines(b"10%\r20%\r30%\r\ndone\r\n\n[syncd] said\n") == ["30%", "done"]


def test_a_signal_has_a_name_even_a_realtime_one() -> None:
    assert signal_name(11) == "SIGSEGV"
    assert signal_name(40) == "signal 40"


def test_counters_that_cannot_be_read_are_not_known() -> None:
    rise = OomKills(3, 7).since(OomKills(1, 7))
    assert rise == OomKills(2, 0)
    assert OomKills(None, 7).since(OomKills(1, 7)).group is None


def test_the_machine_that_runs_this_test_has_a_counter() -> None:
    assert OomKills.read().machine is not None


@pytest.mark.parametrize(
    ("cgroup", "files"),
    [
        ("0::/a/b\n", ["a/b/memory.events", "memory.events"]),
        (
            "4:cpu,memory:/j\n3:cpuset:/\n",
            ["memory/j/memory.oom_control", "memory/memory.oom_control"],
        ),
        ("", []),
    ],
)
def test_the_groups_counter_is_sought_where_each_version_keeps_it(
    cgroup: str, files: list[str], tmp_path: Path
) -> None:
    assert list(_group_files(cgroup, tmp_path)) == [tmp_path / file for file in files]


def test_a_file_system_with_space_is_not_full(tmp_path: Path) -> None:
    assert full_folders([str(tmp_path), "/proc", str(tmp_path / "gone")]) == ()


def test_a_full_file_system_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    space = list(os.statvfs("/"))
    space[4] = 0  # f_bavail
    space[8] &= ~os.ST_RDONLY
    monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result(space))
    assert full_folders(["/a", "/a", "/b"]) == ("/a", "/b")


def test_an_exit_record_closes_the_log() -> None:
    record = ExitRecord(
        run_id="x.0001.0000",
        attempt=2,
        result=Result.FAILED,
        cause="exit 3; last line: (odd)",
        exit_code=3,
        started=100.0,
        ended=160.0,
    )
    end = record.log_end()
    assert parse_log_line(end.line()) == end
    assert end.seconds == 60.0
