"""The command line as a person and a script meet it: real processes, exit codes, messages."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import asdict

import pytest
from waiting import eventually

from protocol.journal import JournalRecord
from protocol.messages import QueuedCommand
from protocol.paths import Layout
from protocol.queue import ShellCommand, parse_command
from protocol.results import Results, RunRecord
from protocol.states import Result, State
from protocol.status import Status
from protocol.wire import Role
from syncd.cli import main
from syncd.config import Key, load_settings
from syncd.log_parts import rotate
from syncd.platform import exclusive_lock
from syncd.setup import initialise
from syncd.state import State as Database


@pytest.fixture(autouse=True)
def own_environment(monkeypatch, tmp_path):
    for name in list(os.environ):
        if name.startswith("SYNCD_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("COLUMNS", "80")
    config = tmp_path / "rclone.conf"
    config.write_text("[drive]\ntype = local\n")
    monkeypatch.setenv("RCLONE_CONFIG", str(config))


@pytest.fixture
def laptop(tmp_path):
    layout = Layout(tmp_path / "laptop")
    initialise(layout, role=Role.CONTROLLER, remote=str(tmp_path / "remote"))
    return layout


@pytest.fixture
def busy(laptop):
    """A laptop's folder with a command that ended, its log, its result and a status."""
    message = QueuedCommand(number=1, line="run:hello", run_id="hello.0001.7f3a")
    database = Database(laptop.private / "state.db")
    database.run("INSERT INTO commands VALUES (1, ?)", json.dumps(asdict(message)))
    database.close()
    record = JournalRecord(
        number=1, line="run:hello", state=State.CLAIMED, time=1.0, worker="w-000001-7f3a9c02"
    )
    laptop.journal.write_bytes(record.encode())
    Results(
        [RunRecord(run_id="hello.0001.7f3a", stage="hello", line="run:hello", result=Result.FAILED)]
    ).save(laptop.results)
    status = Status(time=1.0, worker="w-000001-7f3a9c02", host="vm", sealed=True)
    (laptop.private / "status.json").write_text(json.dumps(asdict(status)))
    laptop.log("hello").write_bytes(b"".join(b"line %d\n" % n for n in range(30)))
    return laptop


@pytest.fixture
def command(capfd, monkeypatch, laptop):
    """Return a function that runs `syncd` here: (exit code, output, errors)."""

    def command(*words, folder=laptop.root):
        given = ("--folder", str(folder)) if folder else ()
        code = main([*words, *given])
        sys.stdout.flush()
        return (int(code), *capfd.readouterr())

    return command


def process(*words, **how):
    """Run `syncd` as a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "syncd", *words], capture_output=True, check=False, timeout=60, **how
    )


# Exit codes


MISTAKES = {
    "no command of that name": (["lunch"], 2, "lunch"),
    "no such option": (["status", "--colour"], 2, "--colour"),
    "an argument is missing": (["run"], 2, "requires an argument"),
    "not a number of lines": (["logs", "hello", "-n", "-1"], 2, "Must be >= 0"),
    "an unknown stage": (["run", "helo"], 3, "Did you mean 'hello'?"),
    "an unknown stage to stop": (["stop", "helo"], 3, "Did you mean 'hello'?"),
    "not the name of a stage": (["run", "a/b"], 3, "stage name 'a/b'"),
    "not the name of a log": (["logs", "../../etc/passwd"], 3, "stage name"),
    "an empty shell command": (["sh", " "], 2, "the command is empty"),
    "a shell command with a NUL": (["sh", "a\0b"], 3, "NUL"),
    "a shell command of two MiB": (["sh", "x" * 2**21], 2, "longer than"),
    "no log yet": (["logs", "hello"], 4, "hello.log: there is none yet"),
    "no log, and no such stage": (["logs", "helo"], 4, "Did you mean 'hello'?"),
    "nothing to follow": (["logs", "-f", "helo"], 4, "Did you mean 'hello'?"),
    "no log of a shell command yet": (["logs", "sh-7"], 4, "sh-7.log: there is none yet"),
    "no such run": (["results", "gate.0001.7f3a"], 4, "there is no such run"),
    "no such role": (["watch", "--role", "master"], 2, "role"),
    "a controller that is to leave": (["watch", "--stop-when-idle", "5m"], 2, "for a worker"),
    "no duration": (["watch", "--stop-when-idle", "soon"], 3, "'soon' is no duration"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_has_its_exit_code_and_one_line_that_says_why(command, mistake):
    words, wanted, told = MISTAKES[mistake]
    code, out, errors = command(*words)
    assert (code, out) == (wanted, "")
    assert errors.startswith("syncd: error: ")
    assert told in errors
    assert "Traceback" not in errors


def test_a_folder_that_is_none_has_its_exit_code(command, tmp_path):
    for folder in (tmp_path, tmp_path / "none"):
        code, _, errors = command("status", folder=folder)
        assert code == 3
        assert "syncd init" in errors


def test_files_that_are_wrong_have_their_exit_codes(command, busy):
    edited = busy.results.read_bytes().replace(b'"failed"', b'"success"')
    busy.results.write_bytes(edited)
    code, _, errors = command("results")
    assert (code, "changed since it was written" in errors) == (4, True)
    busy.results.write_bytes(b"{")
    assert command("results")[0] == 4
    (busy.private / "state.db").write_bytes(b"nonsense" * 1000)
    assert command("status")[0] == 4
    (busy.serve / "stages.toml").write_text("[stages.hello]\ncommand = 1\n")
    code, _, errors = command("run", "hello")
    assert (code, "command = 1" in errors) == (3, True)
    busy.settings.write_text("remot = 1\n")
    code, _, errors = command("sh", "true")
    assert (code, "Did you mean 'remote'?" in errors) == (3, True)


def test_nothing_is_appended_at_the_workers_end(command, tmp_path, laptop):
    worker = Layout(tmp_path / "vm")
    initialise(worker, role=Role.WORKER, remote="drive:x", key_file=laptop.key)
    code, _, errors = command("sh", "true", folder=worker.root)
    assert (code, "this end is the worker's" in errors) == (2, True)
    assert not worker.queue.exists()


def test_a_mistake_in_a_process_of_its_own_has_no_traceback(tmp_path):
    done = process("status", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (3, b"")
    assert done.stderr.startswith(b"syncd: error: find the shared folder")
    assert b"Traceback" not in done.stderr
    (tmp_path / "file").touch()
    done = process("init", "--remote", "drive:x", "--folder", str(tmp_path / "file" / "x"))
    assert done.returncode == 3
    assert b"Traceback" not in done.stderr


@pytest.mark.parametrize("text", [b"\xff\xfe", b"echo \xe4"])
def test_a_shell_command_that_is_not_utf8_is_refused(laptop, text):
    for words, given in ((["sh", "-"], text), ([b"sh", text], b"")):
        done = process(*words, input=given, cwd=laptop.root)
        assert (done.returncode, b"not UTF-8" in done.stderr) == (2, True)


def test_an_interrupt_has_its_exit_code(busy):
    log = busy.log("hello")
    with subprocess.Popen(
        [sys.executable, "-m", "syncd", "logs", "-f", "hello"],
        cwd=busy.root, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as follower:  # fmt: skip
        shown = b"".join(follower.stdout.readline() for _ in range(10))
        assert shown == b"".join(log.read_bytes().splitlines(keepends=True)[-10:])
        with open(log, "ab") as file:
            file.write(b"before\n")
        assert follower.stdout.readline() == b"before\n"
        rotate(log, limit=1)
        log.write_bytes(b"after\n")
        assert follower.stdout.readline() == b"after\n"
        follower.send_signal(signal.SIGINT)
        assert follower.wait(30) == 130
        errors = follower.stderr.read()
    assert b"Traceback" not in errors


def test_a_reader_that_leaves_is_no_error(busy):
    busy.log("hello").write_bytes(b"x" * 79 + b"\n" + b"y\n" * 500_000)
    for words in ("logs hello", "status", "results --json", "--help"):
        line = f"{sys.executable} -m syncd {words} | head -c 1; exit ${{PIPESTATUS[0]}}"
        with exclusive_lock(busy.private / "lock", "watch"):
            done = subprocess.run(
                ["bash", "-c", line], cwd=busy.root, capture_output=True, check=False, timeout=60
            )
        assert (words, done.returncode, done.stderr) == (words, 0, b"")


def test_a_script_is_read_from_standard_input(laptop):
    done = process("sh", "-", input="echo ä\nexit 3\n".encode(), cwd=laptop.root)
    assert done.returncode == 0
    line = laptop.queue.read_text().splitlines()[-1]
    assert parse_command(line) == ShellCommand("echo ä\nexit 3\n")
    done = process("sh", "-", input=b"", cwd=laptop.root)
    assert (done.returncode, b"the command is empty" in done.stderr) == (2, True)


# What is printed


def test_json_parses(command, busy):
    code, out, _ = command("status", "--json")
    status = json.loads(out)
    assert code == 0
    assert [(c["number"], c["state"]) for c in status["commands"]] == [(1, "claimed")]
    assert status["worker"]["host"] == "vm"
    assert json.loads(command("results", "--json")[1])["hello.0001.7f3a"]["result"] == "failed"
    for asked in ("hello.0001.7f3a", "hello", "1"):
        one = json.loads(command("results", asked, "--json")[1])
        assert list(one) == ["hello.0001.7f3a"]
    assert json.loads(command("run", "hello", "--json")[1]) == {"line": "run:hello"}
    assert json.loads(command("stop", "Hello", "--json")[1]) == {"line": "stop:hello"}


def test_what_is_piped_has_no_escape_codes(command, busy):
    for words in (["status"], ["results"], ["results", "hello.0001.7f3a"], ["--version"]):
        out = command(*words, folder=None if words == ["--version"] else busy.root)[1]
        assert out
        assert "\x1b" not in out


@pytest.mark.parametrize(
    ("words", "first", "count"),
    [([], "line 0", 30), (["-n", "3"], "line 27", 3), (["--lines", "100"], "line 0", 30)],
)
def test_logs_prints_all_by_default_or_the_last_lines(command, busy, words, first, count):
    code, out, _ = command("logs", "Hello", *words)
    assert code == 0
    assert (out.splitlines()[0], out.count("\n")) == (first, count)


def test_the_log_of_a_shell_command_is_asked_for_by_its_number(command, busy):
    busy.shell_log(12).write_bytes(b"out\n")
    assert command("logs", "sh-12")[:2] == (0, "out\n")


def test_a_run_that_has_not_ended_is_told_of_by_its_commands_number(command, busy):
    busy.results.unlink()
    code, out, _ = command("results", "1")
    assert (code, out.splitlines()[0]) == (
        0,
        "hello.0001.7f3a  claimed: waits for a worker to take it up",
    )
    account = json.loads(command("results", "1", "--json")[1])["hello.0001.7f3a"]["account"]
    assert account["waits_for"] == "a worker to take it up"


def test_only_a_run_that_is_asked_for_is_shown_with_all_that_it_reported(command, busy):
    assert "exit_code" in command("results", "hello.0001.7f3a")[1]
    assert "exit_code" not in command("results", "hello")[1]


@pytest.mark.skipif(sys.platform != "linux", reason="asks the kernel for its locks")
def test_an_end_that_no_daemon_watches_says_so(command, busy):
    for words in (["status"], ["run", "hello"]):
        with exclusive_lock(busy.private / "lock", "watch"):
            assert command(*words)[2] == ""
        code, _, errors = command(*words)
        assert (code, errors.count("\n")) == (0, 1)
        assert "syncd watch" in errors
        assert str(busy.root) in errors
    assert json.loads(command("status", "--json")[1])["watched"] is False


# Appending


def test_a_command_appends_exactly_one_line(command, laptop):
    laptop.queue.write_bytes(b"# mine\nrun:hello")
    assert command("run", "Hello")[0] == 0
    assert command("sh", "echo ä")[0] == 0
    lines = laptop.queue.read_text("utf-8").splitlines()
    assert lines[:3] == ["# mine", "run:hello", "run:hello"]
    assert parse_command(lines[3]) == ShellCommand("echo ä")
    assert len(lines) == 4


def test_two_processes_that_append_at_once_append_two_lines(laptop):
    laptop.queue.write_bytes(b"run:unfinished")
    words = [sys.executable, "-m", "syncd", "run", "hello"]
    both = [subprocess.Popen(words, cwd=laptop.root, stdout=subprocess.DEVNULL) for _ in range(2)]
    assert [one.wait(60) for one in both] == [0, 0]
    lines = [line for line in laptop.queue.read_text().splitlines() if line]
    assert lines == ["run:unfinished", "run:hello", "run:hello"]


@pytest.mark.parametrize(
    ("result", "cause", "wanted"),
    [("success", "", 0), ("failed", "exit 3", 8), ("refused", "x", 8)],
)
def test_waiting_ends_with_the_command_and_tells_how(laptop, result, cause, wanted):
    database = Database(laptop.private / "state.db")
    with subprocess.Popen(
        [sys.executable, "-m", "syncd", "run", "hello", "--wait", "--json"],
        cwd=laptop.root, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as waiting:  # fmt: skip
        eventually(lambda: b"run:hello\n" in laptop.queue.read_bytes(), within=30)
        message = QueuedCommand(number=1, line="run:hello", run_id="hello.0001.7f3a")
        database.run("INSERT INTO commands VALUES (1, ?)", json.dumps(asdict(message)))
        record = JournalRecord(
            number=1, line="run:hello", state=State.ENDED, time=1.0, worker="w",
            result=Result(result), cause=cause,
        )  # fmt: skip
        laptop.journal.write_bytes(record.encode())
        out, errors = waiting.communicate(timeout=30)
    database.close()
    assert waiting.returncode == wanted
    assert json.loads(out)["result"] == result
    assert b"Traceback" not in errors
    assert (f"{result}: {cause}" in errors.decode()) == (wanted != 0)


def steps(*states, **more):
    """The journal of command 1 up to the last of these states."""
    given = {"number": 1, "line": "run:hello", "time": 1.0, "worker": "w"}
    records = [JournalRecord(**given, state=state) for state in states[:-1]]
    return b"".join(
        r.encode() for r in [*records, JournalRecord(**given, state=states[-1], **more)]
    )


@pytest.fixture
def waiting(laptop):
    """`syncd run hello --wait`, once its command has a number."""
    database = Database(laptop.private / "state.db")
    with subprocess.Popen(
        [sys.executable, "-m", "syncd", "run", "hello", "--wait"],
        cwd=laptop.root, stderr=subprocess.PIPE, text=True,
    ) as waiting:  # fmt: skip
        eventually(lambda: b"run:hello\n" in laptop.queue.read_bytes(), within=30)
        message = QueuedCommand(number=1, line="run:hello", run_id="hello.0001.7f3a")
        database.run("INSERT INTO commands VALUES (1, ?)", json.dumps(asdict(message)))
        yield waiting
    database.close()


def test_waiting_tells_which_attempt_it_is_and_an_interrupt_what_goes_on(laptop, waiting):
    laptop.journal.write_bytes(steps(State.CLAIMED, State.STARTED, attempt=2))
    told = iter(waiting.stderr.readline, "")
    assert any("hello.0001.7f3a started, attempt 2" in line for line in told)
    waiting.send_signal(signal.SIGINT)
    assert "the command goes on" in waiting.communicate(timeout=30)[1]
    assert waiting.returncode == 130


def test_waiting_ends_with_where_the_output_is(laptop, waiting):
    how = {"attempt": 1, "result": Result.SUCCESS, "cause": "exit 0"}
    laptop.journal.write_bytes(steps(State.CLAIMED, State.STARTED, State.ENDED, **how))
    assert "syncd logs hello\n" in waiting.communicate(timeout=30)[1]
    assert waiting.returncode == 0


# Set-up


def test_init_makes_an_end_that_the_other_commands_find(command, tmp_path, monkeypatch):
    folder = tmp_path / "new"
    code, out, _ = command("init", "--remote", "drive:syncd", folder=folder)
    assert (code, "the worker needs a copy" in out) == (0, True)
    assert command("status", folder=folder)[0] == 0
    monkeypatch.setenv("SYNCD_FOLDER", str(folder))
    assert command("status", folder=None)[0] == 0
    monkeypatch.delenv("SYNCD_FOLDER")
    monkeypatch.chdir(folder / "serve")
    assert command("status", folder=None)[0] == 0


def test_init_takes_the_remotes_from_the_environment(command, tmp_path, monkeypatch):
    monkeypatch.setenv("SYNCD_REMOTE", "http://syncd:secret@127.0.0.1:1/objects")
    monkeypatch.setenv("SYNCD_FALLBACK", f"{tmp_path}/drive, drive:x")
    monkeypatch.setenv("SYNCD_KEY", Key.new().text())
    assert command("init", "--role", "worker", folder=tmp_path / "vm")[0] == 0
    settings = load_settings(Layout(tmp_path / "vm"), {}, {})
    assert settings.remote == "http://syncd:secret@127.0.0.1:1/objects"
    assert settings.fallback == (f"{tmp_path}/drive", "drive:x")


def test_an_end_without_a_key_does_not_start(command, tmp_path):
    words = ["watch", "--role", "worker", "--remote", str(tmp_path)]
    code, _, errors = command(*words, folder=tmp_path / "vm")
    assert (code, "there is no key" in errors) == (3, True)


@pytest.mark.parametrize("name", ["in", ".syncd"])
def test_a_place_that_cannot_be_used_is_named(command, laptop, name):
    place = laptop.root / name
    if place.is_dir():
        shutil.rmtree(place)
    place.write_text("a file")
    code, _, errors = command("watch")
    assert (code, str(place) in errors, errors.count("\n")) == (3, True, 1)


def test_a_worker_takes_its_key_from_standard_input(laptop, tmp_path):
    words = ["init", "--role", "worker", "--remote", "drive:x", "--key-file", "-"]
    folder = tmp_path / "vm"
    done = process(*words, "--folder", str(folder), input=laptop.key.read_bytes())
    assert (done.returncode, done.stderr) == (0, b"")
    assert Layout(folder).key.read_bytes() == laptop.key.read_bytes()


def test_completion_can_be_installed(command):
    code, out, _ = command("--help", folder=None)
    assert code == 0
    assert "--install-completion" in out
