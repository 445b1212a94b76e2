import dataclasses

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from protocol.progress import Progress
from protocol.queue import encode_script
from protocol.schema import decode
from protocol.states import Result
from protocol.status import (
    GONE_AFTER_SECONDS,
    EndedLine,
    RunningLine,
    Status,
    WaitingLine,
    duration,
    render_risk,
    render_status,
    shown,
    size,
)

NOW = 1_764_489_600.0
STATUS = Status(time=NOW, worker="w-000001-51b0c7de", host="vm", sealed=True)


def test_a_sealed_idle_worker_says_so_in_five_lines():
    assert render_status(STATUS, now=NOW).splitlines() == [
        "worker w-000001-51b0c7de on vm, as of 2025-11-30T08:00:00Z",
        "",
        "running",
        "  nothing",
        "",
        "disk free 0 B",
    ]


def test_the_age_of_the_heartbeat_is_told_by_the_readers_clock():
    assert "NOT HEARD" not in render_status(STATUS, now=NOW + GONE_AFTER_SECONDS)
    assert "NOT HEARD FOR 1 min 31 s" in render_status(STATUS, now=NOW + GONE_AFTER_SECONDS + 1)
    assert "NOT HEARD" not in render_status(STATUS, now=NOW - 10_000)
    first = render_status(STATUS, now=NOW + 25, ago=True).partition("\n")[0]
    assert first == "worker w-000001-51b0c7de on vm, as of 2025-11-30T08:00:00Z, 25 s ago"
    assert " ago" not in render_status(STATUS, now=NOW + 1, ago=True)
    left = dataclasses.replace(STATUS, leaving="stopped")
    assert "NOT HEARD" not in render_status(left, now=NOW + 1e6)
    assert "The worker has left: stopped" in render_status(left, now=NOW + 1e6)


def test_a_worker_without_a_key_says_so_loudly():
    status = dataclasses.replace(STATUS, sealed=False, problems=("disk full",))
    lines = render_status(status, now=NOW).splitlines()
    assert lines[1].startswith("NOT SEALED")
    assert lines[2] == "PROBLEM: disk full"


def test_everything_that_is_known_is_shown():
    status = dataclasses.replace(
        STATUS,
        running=(
            RunningLine(
                run_id="pretrain.0001.7f3a",
                stage="pretrain",
                attempt=2,
                started=NOW - 65,
                progress=Progress(step=50, total=100, message="loss 0.3"),
                last_line="epoch 3",
                checkpoint="50.pt",
                at_risk_since=NOW - 61,
            ),
        ),
        waiting=(WaitingLine(number=2, line="run:finetune", why="after pretrain.0001.7f3a"),),
        ended=(
            EndedLine(number=3, line="sh:bHM=", result=Result.FAILED, cause="exit 2", ended=NOW),
        ),
        machine={"memory used": "40%"},
        unsent_bytes=2048,
        unsent_since=NOW - 5,
    )
    text = render_status(status, now=NOW)
    for part in (
        "  pretrain.0001.7f3a  for 1 min 5 s, attempt 2",
        "[############------------]  50%  50/100 step  loss 0.3",
        "        epoch 3",
        "safe up to 50.pt; 1 min 1 s of work at risk",
        "     2  run:finetune                 after pretrain.0001.7f3a",
        "     3  sh: ls                       failed at 2025-11-30T08:00:00Z: exit 2",
        "memory used 40%",
        "to be sent 2.0 KiB, waiting for 5 s",
    ):
        assert part in text.splitlines() or f"        {part}" in text.splitlines()


def test_a_run_without_a_safe_checkpoint_says_so_where_it_may_have_one():
    run = RunningLine(run_id="gate.0001.7f3a", stage="gate", attempt=1, started=NOW - 600)
    assert render_risk(run, NOW) == ""
    run = dataclasses.replace(run, at_risk_since=NOW - 600)
    assert render_risk(run, NOW) == "no safe checkpoint yet; 10 min 0 s of work at risk"


NOISE = st.text(max_size=12)
TIMES = st.floats(allow_nan=False, allow_infinity=False)


@given(NOISE, TIMES, TIMES)
@example("a\nb\x1b[2J", 1e300, -1e300)
def test_nothing_that_a_worker_says_breaks_out_of_its_line(noise: str, then: float, now: float):
    status = Status(
        time=then,
        worker=noise,
        host=noise,
        sealed=True,
        running=(
            RunningLine(
                run_id=noise,
                stage=noise,
                attempt=1,
                started=now,
                progress=Progress(step=then, total=now, unit=noise, message=noise),
                last_line=noise,
                checkpoint=noise,
                at_risk_since=then,
            ),
        ),
        waiting=(WaitingLine(number=1, line=noise, why=noise),),
        ended=(EndedLine(number=1, line=noise, result=Result.LOST, cause=noise, ended=then),),
        problems=(noise,),
        machine={noise: noise},
        leaving=noise,
    )
    text = render_status(status, now=now)
    assert all(line.isprintable() for line in text.split("\n"))
    assert decode(Status, dataclasses.asdict(status)) == status


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (-1, "0 s"),
        (59.9, "59 s"),
        (185, "3 min 5 s"),
        (7800, "2 h 10 min"),
        (3 * 86400 + 4 * 3600, "3 d 4 h"),
    ],
)
def test_durations_are_said_as_a_person_says_them(seconds: float, said: str):
    assert duration(seconds) == said


@pytest.mark.parametrize(
    ("count", "said"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (3 * 2**40, "3.0 TiB")]
)
def test_sizes_are_in_binary_units(count: float, said: str):
    assert size(count) == said


def test_a_long_line_is_shown_short():
    assert shown("run:pretrain") == "run:pretrain"
    assert shown("x" * 100) == "x" * 25 + "..."


def test_a_shell_command_is_shown_as_its_script():
    assert shown(encode_script("nvidia-smi\n")) == "sh: nvidia-smi"
    assert shown(encode_script("echo " + "a" * 100)) == "sh: echo aaaaaaaaaaaaaaaa..."
