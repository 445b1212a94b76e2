"""The controller's reading of the queue, where something else is busy or fails."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from protocol.errors import DataError
from protocol.paths import Layout
from protocol.wire import Role
from syncd.config import load_settings
from syncd.controller import Controller
from syncd.setup import initialise


@pytest.fixture
def controller(tmp_path: Path) -> Iterator[Controller]:
    """A controller without its threads, with one line in its queue."""
    layout = Layout(tmp_path / "laptop")
    initialise(layout, role=Role.CONTROLLER, remote=str(tmp_path / "remote"))
    (layout.serve / "stages.toml").write_text('[stages.talk]\ncommand = "echo"\n')
    with contextlib.ExitStack() as stack:
        controller = Controller(layout, load_settings(layout, {}, {}))
        controller.open(stack)
        controller.tick()
        layout.queue.write_text("run:talk\n")
        yield controller


def test_results_that_cannot_be_written_keep_no_line_waiting_and_are_told(
    controller: Controller,
) -> None:
    results = controller.layout.results
    results.unlink()
    results.parent.chmod(0o755)
    if subprocess.run(["chattr", "+i", results.parent], capture_output=True).returncode:
        pytest.skip("nothing can be made immutable here")
    try:
        controller.tick()
    finally:
        subprocess.run(["chattr", "-i", results.parent], check=True)
    assert numbered(controller) == 1
    assert not controller.problems
    (told,) = json.loads(controller.layout.problems.read_bytes())
    assert told.startswith("results.json: cannot be written")
    controller.tick()
    assert results.exists()
    assert json.loads(controller.layout.problems.read_bytes()) == []


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no pipes of that sort")
@pytest.mark.parametrize("name", ["queue.txt", "serve/stages.toml"])
def test_a_pipe_in_the_place_of_a_file_keeps_nobody_waiting(
    controller: Controller, name: str
) -> None:
    path = controller.layout.root / name
    path.unlink()
    os.mkfifo(path)
    controller.step(controller.main_loop)
    controller.step(controller.serve_loop)
    told = " ".join([*controller.problems.values(), *controller.served.problems.values()])
    assert "regular file" in told
    path.unlink()
    if name == "queue.txt":
        path.write_text("run:talk\n")
    else:
        path.write_text('[stages.talk]\ncommand = "echo"\n')
    controller.step(controller.main_loop)
    controller.step(controller.serve_loop)
    assert numbered(controller) == 1
    assert not controller.problems


def test_an_inbox_that_was_taken_away_is_made_again(controller: Controller) -> None:
    shutil.rmtree(controller.layout.inbox)
    controller.step(controller.main_loop)
    assert not controller.problems
    assert controller.layout.results.exists()


def numbered(controller: Controller) -> int:
    return len(controller.state.rows("SELECT number FROM commands"))


def test_other_threads_can_use_the_state_while_serve_is_looked_at(
    controller: Controller, monkeypatch: pytest.MonkeyPatch
) -> None:
    scan = controller.served.scan

    def scan_while_another_writes() -> int:
        other = threading.Thread(target=controller.state.put, args=("other", 1), daemon=True)
        other.start()
        other.join(10)
        assert not other.is_alive(), "the thread that scans serve/ would wait for ever"
        return scan()

    monkeypatch.setattr(controller.served, "scan", scan_while_another_writes)
    controller.tick()
    assert numbered(controller) == 1


@pytest.mark.parametrize("error", [DataError("keep the state", why="full"), OSError("unreadable")])
def test_a_line_that_could_not_be_numbered_is_numbered_later(
    controller: Controller, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    with monkeypatch.context() as broken:
        broken.setattr(controller, "_number", fail)
        with pytest.raises(type(error)):
            controller.tick()
    assert numbered(controller) == 0
    controller.tick()
    assert numbered(controller) == 1
    controller.tick()
    assert numbered(controller) == 1


def test_one_snapshot_is_made_for_all_lines_that_came_together(
    controller: Controller, monkeypatch: pytest.MonkeyPatch
) -> None:
    scans: list[int] = []
    scan = controller.served.scan
    monkeypatch.setattr(controller.served, "scan", lambda: scans.append(scan()) or scans[-1])
    controller.layout.queue.write_text("run:talk\n" * 100)
    controller.tick()
    assert (numbered(controller), len(scans)) == (100, 1)
