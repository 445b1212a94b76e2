"""`syncd up` and `syncd down`, with a stand-in for Google's client: tests/support/fake_colab.py."""

from __future__ import annotations

import json
import os
import shlex
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest
from waiting import eventually

from protocol.errors import ExitCode
from protocol.paths import Layout
from protocol.publish import publish_json
from protocol.states import State
from protocol.status import Status
from protocol.wire import Role
from syncd.cli import main
from syncd.notebook import colab
from syncd.notebook import session as sessions
from syncd.notebook.session import KEY_THERE, Session, read_session, session_file, what_holds
from syncd.platform import exclusive_lock
from syncd.setup import initialise
from syncd.unsent import Unsent
from syncd.view import CommandView

FAKE = Path(__file__).parents[2] / "support" / "fake_colab.py"
# What the cell of a test does: it runs until it is told to end.
CELL = """\
import os, sys, time
print("fetching syncd.whl", flush=True)
plan = {plan!r}
while not os.path.exists(plan) or "cell" not in open(plan).read():
    time.sleep(0.02)
sys.exit("manifest.json cannot be fetched")
"""
WORKER = "w-000001-7f3a9c02"


class Fake:
    """The stand-in's folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()

    def plan(self, *lines: str) -> None:
        (self.folder / "plan").write_text("\n".join(lines))

    def calls(self) -> list[list[str]]:
        """The words of each call, but for the names of sessions and of files."""
        return [call["argv"] for call in self._calls()]

    def _calls(self) -> list[dict[str, list[str]]]:
        path = self.folder / "calls"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def commands(self) -> list[str]:
        return [argv[0] for argv in self.calls()]

    def code(self) -> list[str]:
        """What each call was given to run."""
        return [str(call["code"]) for call in self._calls() if call["argv"][0] == "exec"]

    def end_cells(self) -> None:
        """Have every cell that goes on end."""
        self.plan("cell ends")
        eventually(lambda: not any(self.cells()), within=60, what="a cell goes on")

    def cells(self) -> list[bool]:
        """Whether the newest code that was run goes on, if there was any."""
        path = self.folder / "kernel"
        pid = int(path.read_text()) if path.exists() else 0
        command = Path(f"/proc/{pid}/cmdline")  # of one that has ended, empty or not there
        return [command.exists() and command.read_bytes() != b""] if pid else []

    def sessions(self) -> list[str]:
        path = self.folder / "sessions"
        return path.read_text().split() if path.exists() else []


@pytest.fixture
def fake(tmp_path, monkeypatch):
    for name in list(os.environ):
        if name.startswith("SYNCD_"):
            monkeypatch.delenv(name)
    fake = Fake(tmp_path / "stand-in")
    monkeypatch.setenv("COLAB_STAND_IN", str(fake.folder))
    monkeypatch.setenv("SYNCD_COLAB", shlex.join([sys.executable, str(FAKE)]))
    monkeypatch.setattr(sessions, "LOOK_SECONDS", 0.01)
    cell = CELL.format(plan=str(fake.folder / "plan"))
    made = SimpleNamespace(colab_cell=lambda layout, settings, *, stop_when_idle: cell)
    monkeypatch.setitem(sys.modules, "syncd.notebook.command", made)
    yield fake
    fake.end_cells()


@pytest.fixture
def laptop(tmp_path, fake):
    layout = Layout(tmp_path / "laptop")
    initialise(layout, role=Role.CONTROLLER, remote=str(tmp_path / "remote"))
    return layout


@pytest.fixture
def watched(laptop: Layout) -> Iterator[Layout]:
    """The laptop's folder while a daemon holds it."""
    with exclusive_lock(laptop.private / "lock", "watch"):
        yield laptop


@pytest.fixture
def command(capsys) -> Callable[..., tuple[int, str, str]]:
    """Return a function that runs the command line; it returns exit code, output and errors."""

    def run(*words: str, layout: Layout) -> tuple[int, str, str]:
        code = main([*words, "--folder", str(layout.root)])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def status(**changes: object) -> Status:
    values = {"time": time.time(), "worker": WORKER, "host": "vm", "sealed": True} | changes
    return Status(**values)  # type: ignore[arg-type]


def hear(layout: Layout, told: Status, *, came: float | None = None) -> None:
    """Have the folder say what a controller's daemon writes when a status comes."""
    kept = asdict(told) | {"came": time.time() if came is None else came}
    publish_json(layout.private / "status.json", kept)


def when(condition: Callable[[], object], action: Callable[[], object]) -> threading.Thread:
    """Do something once a condition is true, while the command runs."""

    def wait() -> None:
        eventually(condition, within=60)
        action()

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


def test_up_makes_a_session_gives_it_key_and_cell_and_waits_for_the_worker(fake, watched, command):
    comes = when(lambda: len(fake.code()) == 2, lambda: hear(watched, status()))
    code, out, _ = command("up", "--gpu", "L4", layout=watched)
    comes.join()
    assert code == ExitCode.OK
    assert f"worker {WORKER} on vm is there" in out
    assert fake.commands() == ["version", "sessions", "new", "upload", "exec", "exec"]
    (name,) = fake.sessions()
    assert fake.calls()[2] == ["new", "-s", name, "--gpu", "L4"]
    assert fake.code()[1].startswith("print('the cell runs', flush=True)\n")
    assert fake.cells() == [True], "the client has left, and the cell goes on"
    kept = read_session(watched)
    assert kept is not None
    assert (kept.name, str(kept.gpu), kept.handed) == (name, "L4", True)


def test_the_key_stands_on_no_command_line_nor_in_code_and_is_left_nowhere(fake, watched, command):
    key = watched.key.read_text().strip()
    assert command("up", "--timeout", "1s", layout=watched)[0] == ExitCode.REMOTE
    assert KEY_THERE in fake.calls()[3]
    assert key not in (fake.folder / "calls").read_text()
    assert list((fake.folder / "content").iterdir()) == []
    left = {path for path in watched.private.rglob("*") if path.is_file()}
    assert [path for path in left if key.encode() in path.read_bytes()] == [watched.key]


def test_the_key_is_where_the_cell_looks_for_it(tmp_path, monkeypatch):
    there = tmp_path / "syncd-key"
    there.write_text("a key\n")
    environ: dict[str, str] = {}
    monkeypatch.setattr(os, "environ", environ)
    exec(sessions.TAKE_KEY.replace(KEY_THERE, str(there)), {})
    assert environ == {"SYNCD_KEY": "a key"}
    assert not there.exists()


def test_a_second_up_finds_the_session_and_its_worker(fake, watched, command):
    comes = when(lambda: len(fake.code()) == 2, lambda: hear(watched, status()))
    command("up", layout=watched)
    comes.join()
    before = len(fake.calls())
    code, out, _ = command("up", layout=watched)
    assert code == ExitCode.OK
    assert f"session {fake.sessions()[0]} is there" in out
    assert fake.commands()[before:] == ["version", "sessions"]


def test_an_up_that_was_interrupted_is_gone_on_with(fake, watched, command):
    fake.plan("upload lost")
    assert command("up", "--no-wait", layout=watched)[0] == ExitCode.REMOTE
    (name,) = fake.sessions()
    fake.plan()
    comes = when(lambda: len(fake.code()) == 2, lambda: hear(watched, status()))
    assert command("up", layout=watched)[0] == ExitCode.OK
    comes.join()
    assert fake.sessions() == [name], "no second one is paid for"


def test_a_session_that_has_ended_is_followed_by_another(fake, watched, command):
    comes = when(lambda: len(fake.code()) == 2, lambda: hear(watched, status()))
    command("up", layout=watched)
    comes.join()
    (first,) = fake.sessions()
    (fake.folder / "sessions").write_text("")
    newer = status(worker="w-000002-00000000")
    comes = when(lambda: len(fake.code()) == 4, lambda: hear(watched, newer))
    code, out, _ = command("up", layout=watched)
    comes.join()
    assert code == ExitCode.OK
    assert f"session {first} has ended" in out
    assert "w-000002" in out, "that of the session that has ended is not taken for it"


def test_up_says_what_the_cell_has_said_when_it_ends(fake, watched, command):
    fake.plan("cell fails")
    code, _, errors = command("up", layout=watched)
    assert code == ExitCode.RUN_FAILED
    assert (
        "it ended: the cell runs / fetching syncd.whl / manifest.json cannot be fetched" in errors
    )
    assert "syncd down --now" in errors


def test_up_does_not_wait_for_ever(fake, watched, command):
    code, _, errors = command("up", "--timeout", "1s", layout=watched)
    assert code == ExitCode.REMOTE
    assert "none was heard of in 1 s" in errors
    assert read_session(watched) is not None


def test_a_client_that_loses_touch_with_the_cell_is_no_end_of_it(fake, watched, command):
    fake.plan("exec untied")
    comes = when(lambda: len(fake.code()) == 2, lambda: hear(watched, status()))
    assert command("up", layout=watched)[0] == ExitCode.OK
    comes.join()


def test_a_kernel_that_is_busy_is_not_waited_for(fake, watched, command, monkeypatch):
    monkeypatch.setattr(colab, "CALL_SECONDS", 1.0)
    fake.plan("exec busy")
    code, _, errors = command("up", layout=watched)
    assert code == ExitCode.REMOTE
    assert "may be busy with a cell" in errors


def test_without_waiting_the_cell_is_left_to_itself_once_it_runs(fake, laptop, command):
    code, _, errors = command("up", "--no-wait", layout=laptop)
    assert code == ExitCode.OK
    assert "no `syncd watch` runs" in errors
    assert fake.cells() == [True]


def test_nothing_is_paid_for_where_the_worker_could_not_be_heard(fake, laptop, command):
    code, _, errors = command("up", layout=laptop)
    assert code == ExitCode.USAGE
    assert "syncd watch" in errors
    assert fake.calls() == []


def test_nothing_is_paid_for_where_a_vm_could_not_reach_this_folder(
    fake, watched, command, monkeypatch
):
    monkeypatch.delitem(sys.modules, "syncd.notebook.command")  # the one that makes real cells
    code, _, errors = command("up", layout=watched)
    assert code == ExitCode.CONFIG
    assert "which a VM does not see" in errors
    assert "new" not in fake.commands()


@pytest.mark.parametrize(
    ("plan", "code", "told"),
    [
        ("sessions login", ExitCode.REMOTE, "Log in once by hand"),
        ("sessions offline", ExitCode.REMOTE, "Colab cannot be reached"),
        ("new quota", ExitCode.REFUSED, "may not have such a GPU"),
        ("new many", ExitCode.BUSY, "as many sessions as it may"),
        ("upload lost", ExitCode.REMOTE, "the session has ended"),
        ("version Version: 0.5.0", ExitCode.CONFIG, "0.7.5 or later is needed"),
        ("version colab 1.2.3, of someone else", ExitCode.CONFIG, "0.7.5 or later is needed"),
    ],
)
def test_what_the_client_cannot_do_is_said_with_what_to_do(
    fake, watched, command, plan, code, told
):
    fake.plan(plan)
    found, _, errors = command("up", layout=watched)
    assert found == code
    assert told in errors


def test_a_client_that_is_missing_is_named_with_how_to_get_it(watched, command, monkeypatch):
    monkeypatch.setenv("SYNCD_COLAB", "no-such-colab --auth=adc")
    code, _, errors = command("up", layout=watched)
    assert code == ExitCode.CONFIG
    assert "no-such-colab" in errors
    assert "uv tool install google-colab-cli" in errors


@pytest.mark.parametrize(
    "words",
    [
        ["up", "--gpu", "T5"],
        ["up", "--timeout", "soon"],
        ["up", "--stop-when-idle", "abc"],
    ],
)
def test_a_wrong_option_is_a_usage_error(fake, watched, command, words):
    assert command(*words, layout=watched)[0] == ExitCode.USAGE
    assert fake.calls() == []


@pytest.mark.parametrize("words", ["up", "down"])
def test_it_is_for_the_controller_alone(tmp_path, fake, laptop, command, words):
    vm = Layout(tmp_path / "vm")
    initialise(vm, role=Role.WORKER, remote=str(tmp_path / "remote"), key_file=laptop.key)
    assert command(words, layout=vm)[0] == ExitCode.USAGE


def begin(layout: Layout, fake: Fake, name: str = "syncd-abc123") -> None:
    """Have a session be there that was begun from here."""
    session = Session(name=name, gpu=sessions.Gpu.T4, started=0.0, handed=True)
    publish_json(session_file(layout), asdict(session))
    (fake.folder / "sessions").write_text(name)


def test_down_without_a_session_says_so(fake, laptop, command):
    code, out, _ = command("down", layout=laptop)
    assert (code, out) == (ExitCode.OK, "no session was begun from here\n")


def test_down_ends_the_session_once_nothing_of_it_is_needed(fake, watched, command):
    begin(watched, fake)
    hear(watched, status(unsent_bytes=5))
    sent = when(lambda: "sessions" in fake.commands(), lambda: hear(watched, status()))
    code, out, _ = command("down", layout=watched)
    sent.join()
    assert code == ExitCode.OK
    assert "session syncd-abc123 has ended" in out
    assert fake.sessions() == []
    assert read_session(watched) is None


def test_down_waits_for_no_worker_that_is_not_heard_of_any_more(fake, watched, command):
    begin(watched, fake)
    hear(watched, status(unsent_bytes=5), came=time.time() - 1000)
    code, _, errors = command("down", layout=watched)
    assert code == ExitCode.REMOTE
    assert "not heard of for 16 min" in errors
    assert fake.sessions(), "it may hold what is not here"
    assert command("down", "--now", layout=watched)[0] == ExitCode.OK
    assert fake.sessions() == []


def test_down_does_not_guess_where_nothing_can_be_heard(fake, laptop, command):
    begin(laptop, fake)
    assert command("down", layout=laptop)[0] == ExitCode.USAGE
    assert fake.sessions()
    assert command("down", "--now", layout=laptop)[0] == ExitCode.OK


def test_down_forgets_a_session_that_has_ended_by_itself(fake, laptop, command):
    begin(laptop, fake)
    (fake.folder / "sessions").write_text("")
    assert command("down", layout=laptop)[0] == ExitCode.OK
    assert "stop" not in fake.commands()
    assert read_session(laptop) is None


def test_a_session_that_cannot_be_ended_is_still_ours(fake, laptop, command):
    begin(laptop, fake)
    fake.plan("stop offline")
    assert command("down", "--now", layout=laptop)[0] == ExitCode.REMOTE
    assert read_session(laptop) is not None


def view(state: State = State.ENDED, ended: float = 100.0) -> CommandView:
    return CommandView(
        number=1,
        line="run:train",
        run_id="train.0001.7f3a",
        state=state,
        result=None,
        cause="",
        worker=WORKER,
        attempt=1,
        time=ended,
    )


@pytest.mark.parametrize(
    ("commands", "told", "unsent", "why"),
    [
        ([], None, None, ""),
        ([view(State.STARTED)], None, None, ""),
        ([view(State.QUEUED)], status(leaving="stopped"), None, ""),
        ([view(State.STARTED)], status(), None, "train.0001.7f3a has not ended"),
        ([view(State.STARTED)] * 3, status(), None, "train.0001.7f3a and 2 more has not ended"),
        ([view()], status(), Unsent(commands=1, bytes=9, since=0.0), "commands wait here"),
        ([view()], status(), Unsent(commands=0, bytes=9, since=0.0), ""),
        ([view()], status(unsent_bytes=2048), None, "the worker has 2.0 KiB to send"),
        ([view()], status(time=110.0), None, "may still be on its way"),
        ([view()], status(time=120.0), None, ""),
    ],
)
def test_a_session_is_needed_while_something_of_it_is_not_here(commands, told, unsent, why):
    found = what_holds(commands, told, unsent)
    assert (why in found) if why else (found == "")
