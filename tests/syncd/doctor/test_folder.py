"""What `syncd doctor` says of an end's folder, its role, its key and what it has in the way."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from doctoring import doctor, levels
from ends import Ends
from servers import WebdavServer
from waiting import eventually

from protocol.errors import ExitCode
from protocol.paths import Layout
from protocol.wire import Role
from syncd.config import Key
from syncd.doctor.findings import Finding, Level, ok, summary, warning, wrong
from syncd.doctor.folder import check_filesystem, check_folder
from syncd.doctor.machine import check_gpu
from syncd.doctor.patient import look_at
from syncd.setup import initialise
from syncd.view import read_role


def printed(folder: Path) -> subprocess.CompletedProcess[str]:
    """Run `syncd doctor` as a person does."""
    environ = {k: v for k, v in os.environ.items() if not k.startswith("SYNCD_")}
    command = [sys.executable, "-m", "syncd", "doctor", "-C", str(folder)]
    return subprocess.run(command, env=environ, capture_output=True, text=True)


def test_the_last_line_is_a_summary_and_no_error(local_ends: Ends) -> None:
    layout = local_ends.laptop.layout
    layout.key.chmod(0o644)
    (layout.serve / "stages.toml").write_text("[stages.a]\n\ncommand = \n")
    done = printed(layout.root)
    assert done.returncode == ExitCode.CONFIG
    *lines, last = done.stdout.splitlines()
    assert re.match(rf"2 of {len(lines)} wrong: rights, stages; \d warning", last)
    assert done.stderr == ""
    (stages,) = (line for line in lines if line.startswith("wrong    stages"))
    assert "line 3" in stages
    assert "examples" not in stages  # a folder that only a checkout has


def test_a_summary_names_each_check_once() -> None:
    bad = [wrong(check, "", "", ExitCode.DATA) for check in ("rights", "rights", "disk")]
    assert summary([ok("key", "")]) == "nothing is wrong"
    assert summary([ok("key", ""), warning("gpu", "")]) == "nothing is wrong; 1 warning"
    assert summary([*bad, warning("gpu", ""), warning("clock", "")]) == (
        "3 of 5 wrong: rights, disk; 2 warnings"
    )


def test_each_finding_of_several_remotes_names_its_own(local_ends: Ends, tmp_path: Path) -> None:
    layout, second = local_ends.laptop.layout, tmp_path / "second"
    second.mkdir()
    with open(layout.settings, "a", encoding="utf-8") as settings:
        settings.write(f'fallback = ["{second}", "{tmp_path / "third"}"]\n')
    found = doctor(layout.root)[1]
    remotes = [finding["remote"] for finding in found["remote"]]
    assert remotes == [local_ends.remote, str(second), str(tmp_path / "third")]
    checks = ("there and back", "clock", "deleting", "objects", "other end", "writers")
    for check in checks:
        assert [finding["remote"] for finding in found[check]] == remotes[:2]
    lines = printed(layout.root).stdout.splitlines()
    about = [line for line in lines if re.match(rf"\w+ +({'|'.join(checks)}) ", line)]
    assert len(about) == 2 * len(checks)
    for line in about:
        assert any(f" {remote}: " in line for remote in remotes), line


def test_what_a_finding_says_names_its_remote_once_and_among_several_alone() -> None:
    finding = Finding(check="a", level=Level.OK, found="drive:x lists", remote="drive:x")
    assert finding.told(of_several=True) == "drive:x lists"
    finding = Finding(check="a", level=Level.OK, found="sent", remote="drive:x")
    assert finding.told(of_several=True) == "drive:x: sent"
    assert finding.told() == "sent"
    assert ok("a", "well").told(of_several=True) == "well"


# Which end it is


def test_a_worker_of_which_the_command_line_told_is_known_by_its_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("remote", "second"):
        (tmp_path / name).mkdir()
    layout = Layout(tmp_path / "syncd")
    monkeypatch.setenv("SYNCD_REMOTE", str(tmp_path / "remote"))
    monkeypatch.setenv("SYNCD_FALLBACK", str(tmp_path / "second"))
    monkeypatch.setenv("SYNCD_KEY", Key.new().text())
    watch = [sys.executable, "-m", "syncd", "watch", "--role", "worker", "-C", str(layout.root)]
    with subprocess.Popen(watch, stderr=subprocess.DEVNULL) as process:
        eventually(lambda: read_role(layout), within=60)
        process.terminate()
    assert not layout.settings.exists()
    code, found = doctor(layout.root)
    assert code == 0, levels(found)
    assert "the worker's end" in found["folder"][0]["found"]
    assert found["key"][0]["level"] == "ok"
    assert len(found["remote"]) == 2

    code, found = doctor(layout.root, "--role", "controller")  # a person's word goes before it
    assert "the controller's end" in found["folder"][0]["found"]
    monkeypatch.delenv("SYNCD_REMOTE")
    assert "remote is not set" in str(look_at(layout.root).errors["settings"])


def test_settings_go_before_what_the_daemon_once_was(local_ends: Ends) -> None:
    layout = local_ends.laptop.layout
    local_ends.laptop.start()
    eventually(lambda: read_role(layout), within=60)
    local_ends.laptop.stop()
    assert read_role(layout) is Role.CONTROLLER
    layout.settings.write_text(layout.settings.read_text().replace("controller", "worker"))
    assert look_at(layout.root).role is Role.WORKER


def test_a_gpu_is_needed_at_no_end_only_where_it_is_known_which_end_it_is(
    local_ends: Ends, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    nowhere = tmp_path / "nowhere"
    nowhere.mkdir()
    laptop = local_ends.laptop.layout.root
    for patient, told in (
        (look_at(nowhere), "nvidia-smi shows none; only a worker needs one"),
        (look_at(laptop), "none is needed at this end"),
    ):
        (finding,) = check_gpu(patient, threading.Event())
        assert (finding.level, finding.found) == (Level.OK, told)


# What is wrong with it


def test_a_password_in_the_environment_makes_no_file_a_secret(
    tmp_path: Path, webdav: WebdavServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "remote").mkdir()
    layout = Layout(tmp_path / "laptop")
    initialise(layout, role=Role.CONTROLLER, remote=str(tmp_path / "remote"))
    url = f"http://syncd:bad@127.0.0.1:{webdav.port}"
    monkeypatch.setenv("SYNCD_REMOTE", url)
    code, found = doctor(layout.root)
    assert code == ExitCode.REMOTE
    assert found["rights"][0]["level"] == "ok"
    assert "401" in found["remote"][0]["found"]
    monkeypatch.delenv("SYNCD_REMOTE")
    with open(layout.settings, "a", encoding="utf-8") as settings:
        settings.write(f'fallback = ["{url}"]\n')
    code, found = doctor(layout.root)
    assert code == ExitCode.CONFIG
    assert found["rights"][0]["todo"] == f"chmod 600 '{layout.settings}'"


@pytest.mark.parametrize("name", ["in", "serve", "queue.txt"])
def test_a_file_in_a_folders_place_and_the_other_way_round_is_wrong(
    name: str, local_ends: Ends
) -> None:
    path = local_ends.laptop.layout.root / name
    if path.is_dir():
        shutil.rmtree(path)
        path.write_text("")
    else:
        path.unlink()
        path.mkdir()
    code, found = doctor(local_ends.laptop.layout.root)
    assert code == ExitCode.CONFIG
    assert str(path) in found["folder"][-1]["found"]
    assert found["folder"][-1]["level"] == "wrong"


def test_an_end_without_a_key_is_wrong_unless_it_was_asked_for(local_ends: Ends) -> None:
    laptop, vm = local_ends.laptop.layout, local_ends.new_vm().layout
    for layout, todo in ((laptop, "makes one"), (vm, "Give it the key")):
        layout.key.unlink()
        finding = of_the_key(layout)
        assert (finding.level, finding.exit_code) == (Level.WRONG, ExitCode.CONFIG)
        assert todo in finding.todo
        settings = layout.settings.read_text()
        layout.settings.write_text(f"{settings.replace('# unsealed =', '# was:')}unsealed = true\n")
        assert of_the_key(layout).level is Level.WARNING
    assert "Give it the key" in of_the_key(vm).todo


def of_the_key(layout: Layout) -> Finding:
    found = check_folder(look_at(layout.root), threading.Event())
    return next(finding for finding in found if finding.check == "key")


def test_where_nothing_may_be_written_no_room_is_asked_for(
    local_ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(*args: object, **kwargs: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("syncd.doctor.folder.publish_bytes", denied)
    patient = look_at(local_ends.laptop.layout.root)
    (finding,) = check_filesystem(patient, threading.Event())
    assert (finding.level, finding.todo) == (Level.WARNING, "")
