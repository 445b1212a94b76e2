"""What looks after a worker: it writes into no other's folder, and tells how the worker is."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from ends import End, processes_of
from waiting import eventually

from protocol.errors import RunFailedError, UsageError
from protocol.paths import Layout
from protocol.publish import publish_bytes
from protocol.queue import encode_script
from protocol.wire import Role
from syncd.config import Key, load_key
from syncd.holder import read_holder
from syncd.notebook.folder import Request, prepare, rclone_config
from syncd.notebook.keeper import Keeper
from syncd.platform import Identity
from syncd.setup import initialise

CONFIG = "[drive]\ntype = alias\nremote = /nowhere\n"


@pytest.fixture
def request_(tmp_path: Path) -> Request:
    """What a cell asks for, for a folder that is not there yet."""
    key = Key.new().text()
    remote = tmp_path / "remote"
    remote.mkdir()
    return Request(folder=str(tmp_path / "worker"), key=key, remotes=(str(remote),), rclone=CONFIG)


def files_below(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_folder_is_prepared_with_what_the_cell_brings(request_: Request) -> None:
    layout = Layout(Path(request_.folder))
    prepare(layout, request_)
    config = rclone_config(layout)
    assert (config.read_text(), config.stat().st_mode & 0o777) == (CONFIG, 0o600)
    kept = load_key(layout, {})
    assert kept is not None
    assert kept.text() == request_.key


def of_another_key(request: Request) -> Request:
    return replace(request, key=Key.new().text())


def without_a_key(request: Request) -> Request:
    return replace(request, key="")


@pytest.mark.parametrize(
    ("first", "then", "told"),
    [
        (None, of_another_key, "another shared folder, "),
        (None, without_a_key, "this cell is for one without a key"),
        (without_a_key, of_another_key, "a shared folder without a key"),
    ],
)
def test_nothing_is_written_into_the_folder_of_another_shared_folder(
    request_: Request,
    first: Callable[[Request], Request] | None,
    then: Callable[[Request], Request],
    told: str,
) -> None:
    layout = Layout(Path(request_.folder))
    prepare(layout, first(request_) if first else request_)
    before = files_below(layout.root)
    with pytest.raises(UsageError, match=told) as caught:
        prepare(layout, replace(then(request_), rclone="[other]\ntype = local\n"))
    assert "--worker-folder" in str(caught.value)
    assert files_below(layout.root) == before


def test_an_end_that_is_a_controller_is_made_no_worker(request_: Request) -> None:
    layout = Layout(Path(request_.folder))
    initialise(layout, role=Role.CONTROLLER, remote=request_.remotes[0])
    before, key = files_below(layout.root), load_key(layout, {})
    assert key is not None
    with pytest.raises(UsageError, match="the controller's end"):
        prepare(layout, replace(request_, key=key.text()))
    assert files_below(layout.root) == before


def test_a_worker_of_another_remote_is_left_as_it_is(request_: Request, tmp_path: Path) -> None:
    layout = Layout(Path(request_.folder))
    prepare(layout, request_)
    (layout.private / "state.db").touch()  # it was at work
    before = files_below(layout.root)
    with pytest.raises(UsageError, match="it has been at work on"):
        prepare(layout, replace(request_, remotes=(str(tmp_path),), rclone="[other]\n"))
    assert files_below(layout.root) == before


def test_a_folder_whose_daemon_state_was_removed_can_be_taken_back(request_: Request) -> None:
    layout = Layout(Path(request_.folder))
    prepare(layout, request_)
    for path in layout.private.iterdir():
        path.unlink()
    layout.private.rmdir()
    prepare(layout, request_)
    assert layout.key.exists()


# With a real worker


class Looking:
    """A keeper that looks as often as it is asked to."""

    def __init__(self, request: Request, **limits: float) -> None:
        self.keeper = Keeper(request, **limits)
        self.layout = self.keeper.layout
        self.keeper.prepare()

    def shown(self) -> str:
        self.keeper.look()
        return str(self.keeper.frame(time.time())["text"])

    def until(self, text: str) -> str:
        shown: list[str] = [""]

        def found() -> bool:
            shown[0] = self.shown()
            return text in shown[0]

        eventually(found, within=60, what=lambda: shown[0] + self.log())
        return shown[0]

    def worker(self) -> Identity:
        holder = read_holder(self.layout)
        assert holder is not None
        return holder.process

    def log(self) -> str:
        path = self.layout.private / "watch.log"
        return path.read_text() if path.exists() else ""

    def close(self) -> None:
        """Kill the worker and what it runs."""
        if holder := read_holder(self.layout):
            worker = holder.process
            worker.signal(signal.SIGKILL)
            eventually(lambda: not worker.alive(), within=30)
        if child := self.keeper._child:  # one that waited for the lock may have it now
            child.kill()
            child.wait()
        for pid in processes_of(self.layout):
            psutil.Process(pid).kill()


@pytest.fixture
def look(request_: Request) -> Iterator[Callable[..., Looking]]:
    """Return a function that has a worker looked after."""
    made: list[Looking] = []

    def begin(request: Request | None = None, **limits: float) -> Looking:
        made.append(Looking(request or request_, **limits))
        return made[-1]

    yield begin
    for each in made:
        each.close()


def test_a_worker_that_does_not_answer_is_told_of_and_then_replaced_and_its_run_goes_on(
    look: Callable[..., Looking], tmp_path: Path, request_: Request
) -> None:
    laptop = Layout(tmp_path / "laptop")
    key = tmp_path / "key"
    key.write_text(request_.key)
    initialise(laptop, role=Role.CONTROLLER, remote=request_.remotes[0], key_file=key)
    looking = look(silent_after=3.0, frozen_after=10.0)
    looking.until("running")
    line = encode_script("while [ ! -e end ]; do sleep 0.1; done")
    end = End(laptop)
    laptop.queue.write_text(line + "\n")
    end.start()
    try:
        looking.until("sh.0001")  # with a run the worker does a round every half second
        stage = next(processes_of(looking.layout))
        frozen = looking.worker()
        frozen.signal(signal.SIGSTOP)
        told = looking.until("has not answered for")
        assert " ago" in told, "the status is as of when the worker answered last"
        told = looking.until("had not answered for")
        assert "and was killed" in told
        assert not frozen.alive()
        eventually(lambda: looking.shown() and looking.worker() != frozen, within=60)
        looking.until("sh.0001")
        assert stage in processes_of(looking.layout)
        (looking.layout.root / "end").touch()
        assert "attempt" not in looking.until("success")
    finally:
        end.kill()


def test_a_worker_that_was_killed_is_started_again_and_it_is_told_how_it_ended(
    look: Callable[..., Looking],
) -> None:
    looking = look()
    looking.until("running")
    for told in ("and is started again: killed by signal 9", "(2 times so far): killed by"):
        looking.worker().signal(signal.SIGKILL)
        looking.until(told)
        eventually(lambda: looking.shown() and looking.worker().alive(), within=60)


def test_a_worker_that_would_end_so_again_ends_the_cell_with_its_own_words(
    look: Callable[..., Looking],
) -> None:
    looking = look()
    publish_bytes(looking.layout.settings, b'role = "worker"\nremote = "x:"\npoll = "often"\n')
    with pytest.raises(RunFailedError, match=r"exit code 3: settings: .*poll = 'often'"):
        looking.until("running")


def test_two_cells_at_once_find_the_one_worker_and_another_cell_changes_it(
    look: Callable[..., Looking], request_: Request
) -> None:
    first, second = look(), look()
    first.shown()
    second.shown()  # both have begun to start one: the other ends at the lock
    first.until("running")
    second.until("running")
    worker = first.worker()
    assert worker.alive()
    assert "ended" not in first.shown() + second.shown()
    changed = look(replace(request_, stop_when_idle="1h"))
    eventually(lambda: changed.shown() and changed.worker() != worker, within=60)
    later = changed.worker()
    first.shown()
    assert later.alive(), "the cells do not end each other's worker for ever"
    assert not worker.alive()


def test_new_tokens_that_rclone_writes_are_no_reason_to_start_the_worker_anew(
    look: Callable[..., Looking],
) -> None:
    looking = look()
    looking.until("running")
    before = looking.worker()
    rclone_config(looking.layout).write_text(CONFIG + "token = newer\n")
    looking.shown()
    assert looking.worker() == before
    assert before.alive()


def test_a_machine_that_another_has_replaced_is_told_how_to_take_it_back(
    look: Callable[..., Looking],
) -> None:
    looking = look()
    publish_bytes(looking.layout.fence, b"{}")
    told = looking.shown()
    assert looking.keeper.over
    assert f"remove {looking.layout.private} and run the cell again" in told
