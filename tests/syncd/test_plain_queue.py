"""A plain queue.txt in the remote's root: its lines run where both ends allow it."""

from __future__ import annotations

from pathlib import Path

import pytest
from ends import End, Ends
from waiting import eventually

from protocol.queue import encode_script
from protocol.states import Result
from syncd.view import read_commands

STAGES = """
[stages.hello]
command = "echo hello"
gpu = 0

[stages.wait]
command = "while [ ! -e $SYNCD_STORE/go ]; do sleep 0.05; done"
gpu = 0
"""
SCRIPT = encode_script("echo from a phone")


def allow(end: End) -> None:
    with open(end.layout.settings, "a", encoding="utf-8") as settings:
        settings.write("unsealed_lines = true\n")


@pytest.fixture
def ends(local_ends: Ends) -> Ends:
    local_ends.serve(stages=STAGES)
    local_ends.new_vm()
    return local_ends


@pytest.fixture
def plain(ends: Ends) -> Path:
    return ends.folder / "remote" / "queue.txt"


def test_lines_of_the_plain_queue_run_once_where_both_ends_allow_it(
    ends: Ends, plain: Path
) -> None:
    allow(ends.laptop)
    allow(ends.vm)
    plain.write_text(f"# from a phone\nrun:hello\n{SCRIPT}\n")
    ends.laptop.start()
    ends.vm.start()
    assert ends.ended(1).result is Result.SUCCESS
    assert ends.ended(2).result is Result.SUCCESS
    ends.append("run:hello")  # is not the same line as the one in the other file
    assert ends.ended(3).result is Result.SUCCESS
    plain.unlink()
    ends.laptop.kill()
    ends.laptop.start()
    ends.append("run:hello")
    assert ends.ended(4).result is Result.SUCCESS
    assert len(read_commands(ends.laptop.layout)) == 4


def test_a_worker_that_does_not_allow_unsealed_lines_refuses_them(ends: Ends, plain: Path) -> None:
    """A stop: among them stops nothing."""
    allow(ends.laptop)
    ends.laptop.start()
    ends.vm.start()
    ends.append("run:wait")
    ends.started(1)
    plain.write_text(f"run:hello\n{SCRIPT}\nstop:wait\n")
    for number in (2, 3, 4):
        record = ends.ended(number)
        assert (record.result, record.attempt) == (Result.REFUSED, 0)
        assert "no unsealed lines" in record.cause
    (ends.vm.layout.store / "go").touch()
    assert ends.ended(1).result is Result.SUCCESS
    assert not (plain.parent / "status.txt").exists()


def test_what_became_of_them_stands_beside_the_plain_queue(ends: Ends, plain: Path) -> None:
    allow(ends.laptop)
    allow(ends.vm)
    status, results = (plain.parent / name for name in ("status.txt", "results.json"))
    ends.laptop.start()
    ends.vm.start()
    eventually(status.exists, within=30)
    plain.write_text("run:hello\n")
    assert ends.ended(1).result is Result.SUCCESS
    eventually(lambda: "hello.0001" in results.read_text(), within=30)
    eventually(lambda: "run:hello  " in status.read_text(), within=30)


def test_a_controller_that_does_not_allow_them_does_not_look(ends: Ends, plain: Path) -> None:
    allow(ends.vm)
    plain.write_text(f"{SCRIPT}\n")
    ends.laptop.start()
    ends.vm.start()
    ends.append("run:hello")
    assert ends.ended(1).line == "run:hello"
    assert len(read_commands(ends.laptop.layout)) == 1


@pytest.mark.long
def test_a_fresh_controller_does_not_run_the_plain_queue_again(ends: Ends, plain: Path) -> None:
    allow(ends.laptop)
    allow(ends.vm)
    plain.write_text("run:hello\n")
    ends.append("run:wait")
    ends.laptop.start()
    ends.vm.start()
    eventually(lambda: len(read_commands(ends.laptop.layout)) == 2, within=30)
    ends.laptop.kill()
    for path in ends.laptop.layout.private.glob("state.db*"):
        path.unlink()
    ends.laptop.start()
    with open(plain, "a", encoding="utf-8") as queue:
        queue.write(f"{SCRIPT}\n")
    eventually(lambda: len(read_commands(ends.laptop.layout)) == 3, within=30)
    assert read_commands(ends.laptop.layout)[2].line == SCRIPT
