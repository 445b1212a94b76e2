"""The controller's end as on Windows and macOS: with fakes, since only Linux is at hand.

What is run here is our code with what those systems lack taken away (`support/other_systems.py`),
and single functions with a system's answer put in the place of its own.
"""

from __future__ import annotations

import ast
import codecs
import io
import os
import re
import subprocess
import sys
import types
import unicodedata
from pathlib import Path

import pytest
from ends import Ends
from other_systems import ROOT, ours
from waiting import eventually

from protocol import publish
from protocol.errors import ConfigError, ExitCode
from protocol.messages import PutFile
from protocol.states import Result
from protocol.wire import Role
from syncd import platform
from syncd.cli import main
from syncd.doctor import folder as doctor_folder
from syncd.doctor.patient import look_at
from syncd.setup import initialise

SYSTEMS = ["win32", "darwin"]
PRETEND = [sys.executable, str(ROOT / "tests" / "support" / "other_systems.py")]


def pretending(system: str, *words: str) -> list[str]:
    return [*PRETEND, system, *words]


@pytest.mark.parametrize("system", SYSTEMS)
def test_every_module_of_a_controller_is_imported_without_what_linux_has(system: str) -> None:
    done = subprocess.run(pretending(system, "import"), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ours()


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_controller_does_its_work_without_what_linux_has(
    local_ends: Ends, system: str, tmp_path: Path
) -> None:
    ends = local_ends
    ends.serve(stages='[stages.make]\ncommand = "cat ä; cp ä $SYNCD_ARTIFACT_DIR/made"\ngpu = 0\n')
    (ends.laptop.layout.serve / unicodedata.normalize("NFC", "ä")).write_text("content\n")
    ends.new_vm().start()
    with open(tmp_path / "laptop.log", "ab") as output:
        daemon = subprocess.Popen(
            pretending(system, "syncd", "watch", "-C", str(ends.laptop.layout.root)),
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        # As Notepad saves it.
        text = "# comment\r\nrun:make\r\n"
        ends.laptop.layout.queue.write_bytes(codecs.BOM_UTF16_LE + text.encode("utf-16-le"))
        record = ends.ended(1)
        assert record.result is Result.SUCCESS
        assert b"content" in ends.log("make")
        made = ends.laptop.layout.artifacts / record.run_id / "made"
        eventually(made.exists, within=60, what="the artefact did not arrive")
        done = subprocess.run(
            pretending(system, "syncd", "doctor", "-C", str(ends.laptop.layout.root)),
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert "with the same key" in done.stdout
        # A second one is turned away by the lock.
        again = subprocess.run(
            pretending(system, "syncd", "watch", "-C", str(ends.laptop.layout.root)),
            capture_output=True,
        )
        assert again.returncode == ExitCode.BUSY
    finally:
        daemon.terminate()
        assert daemon.wait(60) == 0


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_worker_elsewhere_is_refused_with_the_reason(
    system: str, tmp_path: Path, local_ends: Ends, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    vm = local_ends.new_vm().layout
    monkeypatch.setattr(platform.sys, "platform", system)
    assert main(["watch", "-C", str(vm.root)]) == ExitCode.CONFIG
    assert "runs on Linux alone" in capsys.readouterr().err
    assert main(["demo", "-C", str(tmp_path / "demo")]) == ExitCode.CONFIG
    key = local_ends.laptop.layout.key
    there = type(vm)(tmp_path / "another")
    with pytest.raises(ConfigError, match=system):
        initialise(there, role=Role.WORKER, remote=str(tmp_path), key_file=key)


# One module asks which system it is


MAY_ASK = {
    "protocol/publish.py",
    "protocol/bench.py",  # names the machine
    "syncd/platform.py",
    "syncd/die_with_parent.py",
}
_SYSTEM = re.compile(r"\b(os\.name|sys\.platform|platform\.system\(\) ==)")
_MODULES = {"fcntl", "pwd", "grp", "resource", "termios", "msvcrt", "winreg", "_winapi"}


def test_one_module_asks_which_system_it_is() -> None:
    for name in ours():
        path = ROOT.joinpath(*name.split("."))
        path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        where = path.relative_to(ROOT).as_posix()
        source = path.read_text("utf-8")
        if where in MAY_ASK:
            continue
        assert not _SYSTEM.search(source), f"{where} asks which system it is on"
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Import):
                found = {alias.name for alias in node.names} & _MODULES
                assert not found, f"{where} imports {found}"


# Names


def test_macos_names_are_composed_on_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    decomposed = unicodedata.normalize("NFD", "größe.py")
    assert platform.portable_name(decomposed) == decomposed
    monkeypatch.setattr(platform.sys, "platform", "darwin")
    assert platform.portable_name(decomposed) == unicodedata.normalize("NFC", "größe.py")


def test_a_name_that_a_disk_takes_for_another_is_found_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "Model.onnx").touch()
    assert platform.folded_onto(tmp_path / "Model.onnx") is None
    assert platform.folded_onto(tmp_path / "model.onnx") is None  # this disk tells them apart
    folding_disk(monkeypatch, tmp_path)
    assert platform.folded_onto(tmp_path / "model.onnx") == "Model.onnx"
    assert platform.folded_onto(tmp_path / "Model.onnx") is None
    assert platform.folded_onto(tmp_path / "other.onnx") is None


def folding_disk(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Have the folder's names looked up as on a disk that does not tell case apart."""
    real = os.path.lexists

    def lexists(path: str | Path) -> bool:
        name = Path(path).name.casefold()
        return real(path) or any(name == entry.casefold() for entry in os.listdir(folder))

    monkeypatch.setattr(platform.os.path, "lexists", lexists)


def test_an_artefact_that_would_replace_another_one_is_told_and_the_first_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from syncd.delivery.contents import Contents
    from syncd.delivery.received import RemoteFiles
    from syncd.state import State

    state = State(tmp_path / "state.db")
    (tmp_path / "content").mkdir()
    contents = Contents(state, tmp_path / "content", lambda: pytest.fail("nothing is fetched"))
    files = RemoteFiles(state, tmp_path, contents, wanted=lambda path: True)
    from hashlib import sha256

    from protocol.messages import Content

    for name, data in (("Model.bin", b"first"), ("model.bin", b"the second")):
        digest = sha256(data).hexdigest()
        files.apply(Content(sha256=digest, size=len(data), blob=data))
        path = f"in/artifacts/r.0001.abcd/{name}"
        files.apply(PutFile(path=path, size=len(data), mode=0o644, sha256=digest))
    folder = tmp_path / "in" / "artifacts" / "r.0001.abcd"
    folder.mkdir(parents=True)
    folding_disk(monkeypatch, folder)
    assert not files.fetch()
    assert (folder / "Model.bin").read_bytes() == b"first"
    assert "'Model.bin', which is there" in files.problems["in/artifacts/r.0001.abcd/model.bin"]
    state.close()


# Windows' own ways


def test_a_rename_waits_for_whoever_has_the_target_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusals, real = [1, 2], os.replace

    def replace(source: Path, target: Path) -> None:
        if refusals:
            refusals.pop()
            raise PermissionError(13, "The process cannot access the file")
        real(source, target)

    monkeypatch.setattr(publish.os, "replace", replace)
    with pytest.raises(PermissionError):
        publish.publish_bytes(tmp_path / "file", b"one")  # here that is no passing state
    monkeypatch.setattr(publish, "_WINDOWS", True)
    publish.publish_bytes(tmp_path / "file", b"one")
    assert (tmp_path / "file").read_bytes() == b"one"
    refusals += [1] * 10
    with pytest.raises(PermissionError):
        publish.publish_bytes(tmp_path / "file", b"two")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_long_root_is_told_where_long_paths_are_refused(
    local_ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor_folder, "LONG_ROOT", 5)
    patient = look_at(local_ends.laptop.layout.root)
    checks = list(doctor_folder.check_filesystem(patient, None))  # type: ignore[arg-type]
    assert not any("260" in finding.found for finding in checks)
    monkeypatch.setattr(doctor_folder, "takes_long_paths", lambda: False)
    checks = list(doctor_folder.check_filesystem(patient, None))  # type: ignore[arg-type]
    assert any("260" in finding.found for finding in checks)


@pytest.mark.parametrize(("value", "allowed"), [(1, True), (0, False), (None, False)])
def test_long_paths_are_what_the_registry_says(
    value: int | None, allowed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Key:
        def __enter__(self) -> Key:
            if value is None:
                raise FileNotFoundError
            return self

        def __exit__(self, *error: object) -> None:
            return

    winreg = types.ModuleType("winreg")
    winreg.HKEY_LOCAL_MACHINE = 0  # type: ignore[attr-defined]
    winreg.OpenKey = lambda root, name: Key()  # type: ignore[attr-defined]
    winreg.QueryValueEx = lambda key, name: (value, 4)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "winreg", winreg)
    assert platform.takes_long_paths()
    monkeypatch.setattr(platform.sys, "platform", "win32")
    assert platform.takes_long_paths() is allowed


def test_a_drive_is_no_remote_on_windows_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not platform.starts_with_drive("C:\\gpu")
    monkeypatch.setattr(platform.sys, "platform", "win32")
    assert platform.starts_with_drive("C:\\gpu")
    assert not platform.starts_with_drive("drive:gpu")
    assert platform.program("rclone") == "rclone.exe"
    assert not platform.has_unix_sockets()
    assert not platform.has_modes()
    assert platform.free_inodes(Path()) is None
    found = os.stat(".")
    assert platform.change_time_ns(found) == found.st_mtime_ns
    assert platform.is_ours(found)


def test_a_console_without_a_character_gets_its_escape(
    local_ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = local_ends
    ends.sh("echo größe 数据")
    console = io.TextIOWrapper(io.BytesIO(), encoding="cp1252")
    ends.laptop.start()
    eventually(lambda: shows(ends, console), within=60, what="the command is not shown")


def shows(ends: Ends, console: io.TextIOWrapper) -> bool:
    assert isinstance(console.buffer, io.BytesIO)
    console.buffer.truncate(0)
    before, sys.stdout = sys.stdout, console
    try:
        assert main(["status", "-C", str(ends.laptop.layout.root)]) == 0
    finally:
        sys.stdout = before
    return "größe \\u6570" in console.buffer.getvalue().decode("cp1252")
