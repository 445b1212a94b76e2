"""A log kept within its budget while it is written: by itself, and under a real supervisor."""

from __future__ import annotations

import errno
import os
import sys

import pytest
from waiting import eventually

from syncd.holes import STEP, held
from syncd.log_parts import LOG_BUDGET, rotated
from syncd.stages import attempt, log_budget
from syncd.stages.attempt_files import AttemptSpec
from syncd.stages.log_budget import LogBudget

SMALL = 4 * STEP


@pytest.fixture
def log(tmp_path):
    path = tmp_path / "pretrain.log"
    path.touch()
    return path


@pytest.fixture
def fd(log):
    fd = os.open(log, os.O_RDWR | os.O_APPEND)
    yield fd
    os.close(fd)


def block(number):
    return b"%07d\n" % number * (STEP // 8)


def test_the_oldest_bytes_go_and_the_newest_stay(log, fd):
    budget = LogBudget(log, fd, budget=SMALL)
    for number in range(12):
        os.write(fd, block(number))
        budget.keep()
        assert held(log) <= SMALL
        assert held(log) >= min(SMALL - 2 * STEP, (number + 1) * STEP)
    data = log.read_bytes()
    assert len(data) == 12 * STEP
    assert data.endswith(block(10) + block(11))
    assert log.stat().st_blocks * 512 <= SMALL + 2**20


def test_the_part_before_goes_first(log, fd):
    rotated(log).write_bytes(block(0) * 3)
    budget = LogBudget(log, fd, budget=SMALL)
    os.write(fd, block(1) * 3)
    budget.keep()
    assert (held(rotated(log)), held(log)) == (0, 3 * STEP)
    os.write(fd, block(2) * 3)
    budget.keep()
    assert held(log) == SMALL - STEP


def test_a_log_that_was_freed_under_an_earlier_supervisor_is_known_to_be(log, fd):
    os.write(fd, block(1) * 8)
    LogBudget(log, fd, budget=SMALL).keep()
    kept = held(log)
    LogBudget(log, fd, budget=SMALL).keep()
    assert held(log) == kept == SMALL - STEP


def test_a_log_that_somebody_emptied_is_kept_within_its_budget(log, fd):
    budget = LogBudget(log, fd, budget=SMALL)
    os.write(fd, block(1) * 8)
    budget.keep()
    os.truncate(log, 0)
    budget.keep()
    os.write(fd, block(2) * 3)
    budget.keep()
    assert held(log) == 3 * STEP
    os.write(fd, block(3) * 8)
    budget.keep()
    assert held(log) <= SMALL


def test_where_nothing_can_be_freed_the_log_grows_on(log, fd, monkeypatch):
    def refuse(fd, end):
        raise OSError(errno.EOPNOTSUPP, "no")

    monkeypatch.setattr(log_budget, "free_until", refuse)
    budget = LogBudget(log, fd, budget=SMALL)
    os.write(fd, block(1) * 8)
    budget.keep()
    assert held(log) == 8 * STEP


def test_a_supervisor_keeps_the_log_of_its_stage_within_the_budget(tmp_path):
    log = tmp_path / "flood.log"
    mark = tmp_path / "go"
    # Written at once, it is seen when the stage waits: the daemon has no part in it.
    flood = (
        "import sys, time, pathlib\n"
        f"for n in range({2 * LOG_BUDGET >> 20}): sys.stdout.write('%07d\\n' % n * 131072)\n"
        f"sys.stdout.flush()\nwhile not pathlib.Path({str(mark)!r}).exists(): time.sleep(0.05)\n"
    )
    spec = AttemptSpec(
        run_id="flood.0001.7f3a",
        stage="flood",
        attempt=1,
        line="run:flood",
        cwd=str(tmp_path),
        log=str(log),
        command=(sys.executable, "-c", flood),
    )
    folder = attempt.prepare(tmp_path / "runs" / spec.run_id, spec)
    attempt.spawn(folder)
    eventually(
        lambda: log.exists() and log.stat().st_size > 2 * LOG_BUDGET and held(log) <= LOG_BUDGET,
        within=60,
        what=lambda: f"{log.stat().st_size} bytes, of which {held(log)} are held",
    )
    mark.touch()
    ended = eventually(
        lambda: isinstance(found := attempt.observe(folder), attempt.Ended) and found
    )
    assert ended.record.cause == "exit 0"
    assert log.stat().st_blocks * 512 <= LOG_BUDGET + 2**20
    with open(log, "rb") as file:
        file.seek(-(STEP), os.SEEK_END)
        *_, before, last, end = file.read().split(b"\n")
    assert before == b"%07d" % ((2 * LOG_BUDGET >> 20) - 1)
    assert last.startswith(b"[syncd] end flood.0001.7f3a attempt 1")
    assert end == b""
