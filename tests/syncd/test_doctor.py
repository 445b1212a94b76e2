"""`syncd doctor` on real ends, healthy and in every way ill that a person meets."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from doctoring import doctor, levels
from ends import Ends
from machine import fill, folding_disk, small_disk
from servers import WebdavServer
from waiting import eventually

from protocol.errors import ConfigError, ExitCode, RefusedError
from protocol.paths import Layout
from protocol.wire import Role
from syncd.config import Key
from syncd.doctor import patient as patient_module
from syncd.doctor import remote as doctor_remote
from syncd.doctor.checks import Check, run_checks
from syncd.doctor.findings import Finding, Level, exit_code, from_error, ok, warning, wrong
from syncd.doctor.patient import Patient, look_at
from syncd.doctor.remote import check_remote
from syncd.setup import initialise
from syncd.watching import Watch

NOBODY = 65534


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "syncd", "doctor", *words]


def environ() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if not k.startswith("SYNCD_")}


def started(ends: Ends) -> Ends:
    ends.serve(stages='[stages.hello]\ncommand = "echo hello"\ngpu = 0\n')
    ends.new_vm()
    ends.laptop.start()
    ends.vm.start()
    ends.append("run:hello")
    ends.ended(1)
    return ends


@pytest.fixture(scope="module")
def worked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ends]:
    """Both ends after they have worked, and the daemons have ended."""
    folder = tmp_path_factory.mktemp("worked")
    (folder / "remote").mkdir()
    ends = started(Ends(folder, str(folder / "remote")))
    eventually(lambda: ends.status(), within=60, what="no status came")
    ends.vm.kill()
    ends.laptop.kill()
    yield ends
    ends.close()


@pytest.fixture
def laptop(worked: Ends, tmp_path: Path) -> Layout:
    """A copy of that laptop's folder, to make ill."""
    # A socket is nothing that could be copied.
    there, ignore = worked.laptop.layout.root, shutil.ignore_patterns("rclone")
    shutil.copytree(there, tmp_path / "laptop", ignore=ignore)
    return Layout(tmp_path / "laptop")


def test_a_healthy_pair_has_nothing_wrong(ends: Ends) -> None:
    started(ends)
    for end in (ends.laptop, ends.vm):
        code, found = doctor(end.layout.root)
        assert code == 0
        # A machine for tests has no GPU, and may be short of memory and disk.
        assert levels(found).keys() <= {"gpu", "memory", "disk"}
        assert "64.0 KiB sent in" in found["there and back"][0]["found"]
        assert "with the same key" in found["other end"][0]["found"]
        assert "agree" in found["clock"][0]["found"]
        assert found["deleting"][0]["level"] == "ok"
    assert "was heard" in doctor(ends.laptop.layout.root)[1]["worker"][0]["found"]


def test_before_init_it_says_what_to_do(tmp_path: Path) -> None:
    code, found = doctor(tmp_path)
    assert code == ExitCode.CONFIG
    assert "syncd init" in found["folder"][0]["todo"]
    assert levels(found)["folder"] == "wrong"
    assert found["rclone"][0]["level"] == "ok"


def test_lines_are_plain_when_they_are_piped(local_ends: Ends) -> None:
    done = subprocess.run(
        command("-C", str(local_ends.laptop.layout.root)),
        env=environ(),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0
    assert "\x1b" not in done.stdout
    *lines, last = done.stdout.splitlines()
    assert all(line.split()[0] in ("ok", "warning", "wrong") for line in lines)
    assert last.startswith("nothing is wrong; ")
    assert done.stderr == ""
    assert any(line.startswith("warning  daemon") and "syncd watch" in line for line in lines)


def test_broken_settings_hide_no_other_check(local_ends: Ends) -> None:
    layout = local_ends.laptop.layout
    layout.settings.write_text("role = controller\n")
    code, found = doctor(layout.root)
    assert code == ExitCode.CONFIG
    assert str(layout.settings) in found["settings"][0]["found"]
    assert found["key"][0]["level"] == "ok"
    assert found["disk"]
    assert "not looked at" in found["remote"][0]["found"]


def test_wrong_rights_are_told_with_the_command_that_mends_them(local_ends: Ends) -> None:
    layout = local_ends.laptop.layout
    layout.key.chmod(0o644)
    layout.private.chmod(0o755)
    code, found = doctor(layout.root)
    assert code == ExitCode.CONFIG
    told = [finding["todo"] for finding in found["rights"]]
    assert told == [f"chmod 700 '{layout.private}'", f"chmod 600 '{layout.key}'"]


def test_a_key_that_is_none_is_told_and_nothing_is_taken_for_foreign(laptop: Layout) -> None:
    laptop.key.write_text("syncd1.nonsense\n")
    code, found = doctor(laptop.root)
    assert code == ExitCode.CONFIG
    assert found["key"][0]["level"] == "wrong"
    assert "writers" not in found


def test_another_key_at_the_other_end_is_told(laptop: Layout) -> None:
    Key.new().save(laptop)
    code, found = doctor(laptop.root)
    assert code == ExitCode.REFUSED
    assert "cannot be heard" in found["other end"][0]["found"]
    assert "key" in found["other end"][0]["todo"]


def test_a_server_that_is_down_is_the_remote_s_fault(
    tmp_path: Path, webdav: WebdavServer, rclone_config: Path
) -> None:
    rclone_config.write_text(webdav.section("there"))
    layout = Layout(tmp_path / "laptop")
    fs, config = webdav.fs("there"), str(rclone_config)
    initialise(layout, role=Role.CONTROLLER, remote=fs, rclone_config=config)
    webdav.kill()
    code, found = doctor(layout.root)
    assert (code, levels(found)["remote"]) == (ExitCode.REMOTE, "wrong")
    assert found["remote"][0]["todo"]
    webdav.start()
    rclone_config.write_text(webdav.section("there", password="another"))
    code, found = doctor(layout.root)
    assert code == ExitCode.REMOTE
    assert "password" in found["remote"][0]["todo"]


def test_a_folder_of_the_remote_that_is_not_there_is_not_made(tmp_path: Path) -> None:
    layout = Layout(tmp_path / "laptop")
    initialise(layout, role=Role.CONTROLLER, remote=str(tmp_path / "not" / "mounted"))
    code, found = doctor(layout.root)
    assert code == 0
    assert "no such folder" in found["remote"][0]["found"]
    assert not (tmp_path / "not").exists()


def test_what_was_sent_is_removed_after_an_interrupt(local_ends: Ends) -> None:
    layout, there = local_ends.laptop.layout, Path(local_ends.remote)
    with open(layout.settings, "a", encoding="utf-8") as settings:
        settings.write('bwlimit = "32k"\n')  # 64 KiB take seconds
    process = subprocess.Popen(
        command("-C", str(layout.root)), env=environ(), stdout=subprocess.DEVNULL
    )
    eventually(lambda: list(there.glob("doctor-*")), within=60, what="nothing was sent")
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == ExitCode.INTERRUPTED
    assert list(there.iterdir()) == []


def test_what_a_doctor_that_was_killed_has_left_is_removed_by_a_later_one(
    local_ends: Ends,
) -> None:
    there = Path(local_ends.remote)
    old, new = there / "doctor-0123456789ab", there / "doctor-ba9876543210"
    for left in (old, new):
        left.mkdir()
        (left / "object").write_bytes(b"x")
    hours_ago = time.time() - 2 * doctor_remote.LEFT_SECONDS
    os.utime(old, (hours_ago, hours_ago))
    assert doctor(local_ends.laptop.layout.root)[0] == 0
    assert [path.name for path in there.iterdir()] == [new.name]  # another may be at work


def test_somebody_else_s_folder_is_told_and_not_taken(local_ends: Ends) -> None:
    if os.getuid() != 0:
        pytest.skip("only root can be somebody else")
    layout = local_ends.laptop.layout
    # Once as ourselves: what it imports must be there before, for that user may not look into our
    # Python.
    program = f"""
import contextlib, io, os, sys
from syncd.cli import main
words = ["doctor", "--json", "-C", {str(layout.root)!r}]
with contextlib.redirect_stdout(io.StringIO()):
    main(words)
os.setgroups([])
os.setuid({NOBODY})
sys.exit(main(words))
"""
    for parent in (layout.root, *layout.root.parents):
        if parent.is_relative_to(tempfile.gettempdir()) and parent != Path(tempfile.gettempdir()):
            parent.chmod(0o755)
    done = subprocess.run([sys.executable, "-c", program], env=environ(), capture_output=True)
    found = [(f["check"], f["level"], f["found"]) for f in json.loads(done.stdout)]
    assert done.returncode == ExitCode.CONFIG
    told = {f[2].replace(str(layout.root), "") for f in found if f[:2] == ("rights", "wrong")}
    assert told >= {f"/{name} cannot be written by this user" for name in ("in", "serve")}
    assert "wrong" in {f[1] for f in found if f[0] == "key"}
    assert "python" in {f[0] for f in found}
    assert ("file system", "warning") in {f[:2] for f in found}  # the rights are told already


def test_a_full_disk_is_told(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 8):
        layout = Layout(tmp_path / "disk" / "laptop")
        (tmp_path / "remote").mkdir()
        initialise(layout, role=Role.CONTROLLER, remote=str(tmp_path / "remote"))
        fill(tmp_path / "disk" / "full")
        code, found = doctor(layout.root)
        assert code == ExitCode.DATA
        assert "Make room" in found["disk"][0]["todo"]
        assert "Make room" in found["file system"][0]["todo"]
        assert found["there and back"][0]["level"] == "ok"


def test_a_disk_that_does_not_tell_case_apart_is_told(tmp_path: Path) -> None:
    image, mount = tmp_path / "image", tmp_path / "disk"
    with folding_disk(image, mount):
        layout = Layout(mount / "laptop")
        (tmp_path / "remote").mkdir()
        initialise(layout, role=Role.CONTROLLER, remote=str(tmp_path / "remote"))
        found = doctor(layout.root)[1]
        assert "differ only in case" in found["file system"][0]["found"]


def test_an_end_that_was_replaced_and_a_stranger_are_told(laptop: Layout, tmp_path: Path) -> None:
    remote = tmp_path / "remote"
    settings = laptop.settings.read_text("utf-8")
    there = re.search(r'remote = "(.*)"', settings)
    assert there
    shutil.copytree(there[1], remote)
    laptop.settings.write_text(settings.replace(there[1], str(remote)))
    own = next(remote.glob("c-*"))
    shutil.copytree(own, remote / "c-000009-0badf00d")
    code, found = doctor(laptop.root)
    assert "c-000009-0badf00d" in found["writers"][0]["found"]
    assert (code, found["writers"][0]["level"]) == (0, "warning")

    other = Layout(tmp_path / "other")
    initialise(other, role=Role.CONTROLLER, remote=str(remote), key_file=laptop.key)
    with Watch(other, tmp_path / "output").running():
        eventually(lambda: len(list(remote.glob("c-*/*-pack-*"))) > 2, within=60)
        eventually(lambda: doctor(laptop.root)[0] == ExitCode.REFUSED, within=60)
    assert "has taken over from this end" in doctor(laptop.root)[1]["writers"][0]["found"]


def test_what_the_daemon_has_told_is_shown(laptop: Layout) -> None:
    (laptop.serve / "stages.toml").write_text("[stages.broken\n")
    laptop.problems.write_text('["serve/x: cannot be read"]')
    code, found = doctor(laptop.root)
    assert code == ExitCode.CONFIG
    assert found["stages"][0]["level"] == "wrong"
    (problem,) = found["problems"]
    assert (problem["level"], problem["found"]) == ("warning", "serve/x: cannot be read")


def clock(patient: Patient) -> list[Finding]:
    found = list(check_remote(patient, threading.Event()))
    return [finding for finding in found if finding.check == "clock"]


def test_a_clock_that_is_off_is_a_warning(
    local_ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    patient = look_at(local_ends.laptop.layout.root)
    true = time.time
    for off, sense in ((3600.0, "ahead of"), (-3600.0, "behind")):
        monkeypatch.setattr(doctor_remote.time, "time", lambda off=off: true() + off)
        (finding,) = clock(patient)
        assert finding.level is Level.WARNING
        assert f"3600 s {sense} the remote's" in finding.found.replace("3599", "3600")
        assert "Nothing depends on it" in finding.todo


def test_a_worker_s_clock_that_is_ahead_is_a_warning(laptop: Layout) -> None:
    path = laptop.private / "status.json"
    kept = json.loads(path.read_bytes())
    path.write_text(json.dumps({**kept, "time": kept["came"] + 600}))
    finding = doctor(laptop.root)[1]["clock"][-1]
    assert (finding["level"], "600 s ahead" in finding["found"]) == ("warning", True)


def test_a_worker_that_is_silent_for_long_is_a_warning(laptop: Layout) -> None:
    path = laptop.private / "status.json"
    kept = json.loads(path.read_bytes())
    path.write_text(json.dumps({**kept, "came": time.time() - 3600, "heartbeat": 20.0}))
    (finding,) = doctor(laptop.root)[1]["worker"]
    assert (finding["level"], "was heard 1 h 0 min ago" in finding["found"]) == ("warning", True)
    path.write_text(json.dumps({**kept, "leaving": "stopped"}))
    (finding,) = doctor(laptop.root)[1]["worker"]
    assert (finding["level"], "it has left" in finding["found"]) == ("ok", True)


def test_a_damaged_state_is_told_with_what_to_do(laptop: Layout) -> None:
    for path in laptop.private.glob("state.db-*"):
        path.unlink()
    (laptop.private / "state.db").write_bytes(b"SQLite format 3\0" + bytes(4096))
    code, found = doctor(laptop.root)
    assert code == ExitCode.DATA
    assert "move .syncd/state.db away" in found["state"][0]["todo"]


def test_a_bandwidth_limit_that_is_none_is_a_setting_that_is_wrong(laptop: Layout) -> None:
    with open(laptop.settings, "a", encoding="utf-8") as settings:
        settings.write('bwlimit = "10 MB/s"\n')
    code, found = doctor(laptop.root)
    assert code == ExitCode.CONFIG
    assert "500k:2M" in found["settings"][0]["found"]


# How checks are run


def test_a_folder_that_hangs_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forever = threading.Event()

    def hang(start: Path) -> Layout:
        forever.wait()
        raise ConfigError("find the folder", why="it hung")

    monkeypatch.setattr(patient_module, "find_folder", hang)
    try:
        patient = look_at(tmp_path, seconds=0.1)
    finally:
        forever.set()
    assert "hangs" in patient.errors["folder"].hint


def fails(patient: Patient, stop: threading.Event) -> Iterator[Finding]:
    yield ok("first", "before it failed")
    raise ZeroDivisionError("no")


def refuses(patient: Patient, stop: threading.Event) -> Iterator[Finding]:
    raise RefusedError("look", why="it may not", hint="Ask.")
    yield


def hangs(patient: Patient, stop: threading.Event) -> Iterator[Finding]:
    yield warning("hangs", "so far")
    stop.wait()


def fine(patient: Patient, stop: threading.Event) -> Iterator[Finding]:
    yield ok("fine", "all well")


def test_a_check_that_fails_or_hangs_hides_no_other() -> None:
    checks = [Check("f", fails), Check("r", refuses), Check("h", hangs, 0.1), Check("g", fine)]
    found = list(run_checks(checks, Patient()))
    assert [(f.check, f.level) for f in found] == [
        ("first", Level.OK),
        ("f", Level.WRONG),
        ("r", Level.WRONG),
        ("hangs", Level.WARNING),
        ("h", Level.WRONG),
        ("fine", Level.OK),
    ]
    assert "ZeroDivisionError" in found[1].found
    assert found[1].exit_code is ExitCode.FAULT
    assert found[2].todo == "Ask."


def test_a_check_is_told_to_stop_when_nobody_waits_any_more() -> None:
    told = threading.Event()

    def cleans(patient: Patient, stop: threading.Event) -> Iterator[Finding]:
        stop.wait()
        told.set()
        yield ok("cleans", "")

    running = run_checks([Check("g", fine), Check("c", cleans)], Patient())
    assert next(running).check == "fine"
    running.close()
    assert told.is_set()


def test_the_exit_code_is_that_of_what_to_mend_first() -> None:
    remote = wrong("a", "x", "", ExitCode.REMOTE)
    config = wrong("b", "y", "", ExitCode.CONFIG)
    assert exit_code([]) is exit_code([ok("a", "x"), warning("b", "y")]) is ExitCode.OK
    assert exit_code([remote, config, ok("c", "")]) is ExitCode.CONFIG


def test_what_others_wrote_stays_in_its_line() -> None:
    error = RefusedError("read", path="a\nb", why="no\x1b[2J.", hint="Look.")
    told = from_error("c", error).told()
    assert told.isprintable()
    assert told.endswith("Look.")
