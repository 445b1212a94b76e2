"""The controller's reading of the queue, where something else is busy or fails."""

from __future__ import annotations

import contextlib
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
