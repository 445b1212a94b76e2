"""The cell in a real Jupyter server's kernel, driven as Jupyter's page drives it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from ends import PATIENCE
from notebooks import Cell, JupyterServer, Kernel, Laptop, Machine
from waiting import eventually

from protocol.journal import parse_journal
from protocol.states import State
from syncd.platform import Identity

# Counts, slowly, and ends when it is told to.
SCRIPT = "n=0; while [ ! -e {end} ]; do n=$((n+1)); echo count $n; sleep 0.1; done"


@pytest.fixture
def kernel(machine: Machine) -> Iterator[Kernel]:
    with JupyterServer(machine) as server:
        made = Kernel(server)
        yield made
        made.close()


@pytest.fixture
def cell(laptop: Laptop, machine: Machine) -> str:
    """The text of a cell, which finds the key in a file."""
    (machine.home / ".syncd-key").write_text(laptop.key())
    made = laptop.bootstrap("--without-trainer")
    return str(made["cell"])


def _worker(machine: Machine) -> Identity:
    return Cell.worker_of(machine.home / "syncd")


def _running_script(laptop: Laptop, machine: Machine) -> Path:
    """Have a command run that goes on until the file that is returned is there."""
    end = machine.folder / "end"
    laptop.append(SCRIPT.format(end=end))
    _counts_on(laptop)
    return end


def _counts_on(laptop: Laptop) -> None:
    """Wait until the laptop sees the command count on from where it is now."""
    log = laptop.layout.inbox / "sh-1.log"
    known = log.read_bytes().count(b"count ") if log.exists() else 0
    eventually(lambda: log.exists() and log.read_bytes().count(b"count ") > known, within=PATIENCE)


def _ended_well(laptop: Laptop, end: Path) -> None:
    """The command ends in success, after one attempt."""
    end.touch()

    def ended() -> bool:
        records, _ = parse_journal(laptop.layout.journal.read_bytes())
        return any(record.state is State.ENDED for record in records)

    eventually(ended, within=PATIENCE)
    records, _ = parse_journal(laptop.layout.journal.read_bytes())
    assert [record.state for record in records] == [State.CLAIMED, State.STARTED, State.ENDED]
    assert [str(record.result) for record in records if record.result] == ["success"]


def test_an_interrupt_ends_the_cell_and_nothing_else(
    laptop: Laptop, machine: Machine, kernel: Kernel, cell: str
) -> None:
    kernel.run(cell)
    kernel.until("running", within=120)
    before, end = _worker(machine), _running_script(laptop, machine)
    kernel.until("count")
    kernel.interrupt()
    assert kernel.until_over() == "ok"
    assert "go on" in kernel.text
    last = [each for each in kernel.outputs if each["kind"] == "update_display_data"][-1]
    assert all("NOT LIVE ANY MORE" in text for text in last["data"].values())
    _counts_on(laptop)
    kernel.run(cell)
    kernel.until("count", within=120)
    assert _worker(machine) == before
    _ended_well(laptop, end)
    kernel.until("success")


def test_a_restart_of_the_kernel_while_the_cell_runs_leaves_the_worker_alone(
    laptop: Laptop, machine: Machine, kernel: Kernel, cell: str
) -> None:
    kernel.run(cell)
    kernel.until("running", within=120)
    before, end = _worker(machine), _running_script(laptop, machine)
    kernel.restart()
    _counts_on(laptop)
    kernel.run(cell)
    kernel.until("count", within=120)
    assert _worker(machine) == before
    _ended_well(laptop, end)


def test_a_kernel_killed_with_its_group_leaves_the_worker_alone(
    laptop: Laptop, machine: Machine, kernel: Kernel, cell: str
) -> None:
    pid = kernel.pid()
    kernel.run(cell)
    kernel.until("running", within=120)
    before, end = _worker(machine), _running_script(laptop, machine)
    os.killpg(os.getpgid(pid), signal.SIGKILL)
    _counts_on(laptop)
    eventually(lambda: kernel.alive_again(pid), within=PATIENCE)
    kernel.run(cell)
    kernel.until("count", within=120)
    assert _worker(machine) == before
    _ended_well(laptop, end)


def test_the_cell_asks_for_the_key_where_nothing_has_it(
    laptop: Laptop, machine: Machine, kernel: Kernel, cell: str
) -> None:
    (machine.home / ".syncd-key").unlink()
    kernel.run(cell)
    kernel.until("key (a line of")
    kernel.answer("no key")
    eventually(lambda: kernel.prompts() == 2, within=PATIENCE)
    assert "what was typed in: no key of ours" in kernel.text
    assert "2 tries left" in kernel.text
    kernel.answer(laptop.key())
    kernel.until("running", within=120)


def test_a_failure_of_the_cell_is_its_message_alone(
    laptop: Laptop, machine: Machine, kernel: Kernel, cell: str
) -> None:
    (machine.home / ".syncd-key").unlink()
    kernel.run(cell)
    kernel.until("key (a line of")
    kernel.answer("")
    assert kernel.until_over() == "error"
    (error,) = [each for each in kernel.outputs if each["kind"] == "error"]
    assert len(error["traceback"]) == 1
    assert error["traceback"][0].startswith("No key that opens this cell was found")
    assert "To exit" not in kernel.text


def test_it_shows_html_that_takes_the_place_of_what_was_shown(
    laptop: Laptop, machine: Machine, kernel: Kernel, cell: str
) -> None:
    kernel.run(cell)
    kernel.until("running", within=120)
    laptop.append("echo '<b>&amp;</b>'")
    kernel.until("success")
    kinds = [each["kind"] for each in kernel.outputs if each["kind"] != "stream"]
    assert kinds[0] == "display_data"
    assert set(kinds[1:]) == {"update_display_data"}
    shown = kernel.outputs[-1]["data"]["text/html"]
    assert "success" in shown
    assert "<b>" not in shown
