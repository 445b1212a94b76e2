"""Process identity, death with the parent, locks and file systems: with real processes."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from waiting import eventually

from protocol.errors import BusyError
from syncd import platform
from syncd.platform import (
    Identity,
    boot_id,
    die_with_parent,
    exclusive_lock,
    filesystem_type,
    process_start,
)

FOREVER = [sys.executable, "-c", "import threading; threading.Event().wait()"]


@pytest.fixture
def child():
    process = subprocess.Popen(FOREVER)
    yield process
    process.kill()
    process.wait()


def test_this_process_is_alive():
    assert Identity.of(os.getpid()).alive()


def test_there_is_no_identity_without_a_process(child):
    child.kill()
    child.wait()
    assert Identity.of(child.pid) is None
    assert process_start(child.pid) is None
    assert Identity.of(0) is None
    assert Identity.of(-1) is None


def test_an_identity_survives_being_written_down(child):
    identity = Identity.of(child.pid)
    assert Identity(**dataclasses.asdict(identity)) == Identity.of(child.pid)
    assert Identity(**dataclasses.asdict(identity)).alive()


def test_a_zombie_is_not_alive_and_takes_no_signal(child):
    identity = Identity.of(child.pid)
    child.kill()
    eventually(lambda: not identity.alive())
    assert process_start(child.pid) == identity.start  # not reaped yet
    assert identity.signal(signal.SIGTERM) is False


def test_another_process_with_the_same_id_is_neither_alive_nor_signalled(child):
    stranger = dataclasses.replace(Identity.of(child.pid), start="1")
    assert not stranger.alive()
    assert stranger.signal(signal.SIGKILL) is False
    assert child.poll() is None


def test_a_process_of_another_boot_is_neither_alive_nor_signalled(child):
    stranger = dataclasses.replace(Identity.of(child.pid), boot="another")
    assert not stranger.alive()
    assert stranger.signal(signal.SIGKILL) is False
    assert child.poll() is None


def used_again(pid: int) -> subprocess.Popen | None:
    """Start a process that gets the id of a dead one; None where the system does not let us."""
    for _ in range(200):  # others take ids, too
        try:
            Path("/proc/sys/kernel/ns_last_pid").write_text(str(pid - 1))
        except OSError:
            return None
        process = subprocess.Popen(FOREVER)
        if process.pid == pid:
            return process
        process.kill()
        process.wait()
    return None


def test_a_process_id_that_is_really_used_again_is_neither_alive_nor_signalled():
    first = subprocess.Popen(FOREVER)
    identity = Identity.of(first.pid)
    first.kill()
    first.wait()
    # A start is told to the clock tick; ids are used again much later than that.
    tick = int(identity.start) + 1
    eventually(lambda: time.clock_gettime(time.CLOCK_BOOTTIME) * os.sysconf("SC_CLK_TCK") > tick)
    stranger = used_again(identity.pid)
    if stranger is None:
        pytest.skip("process ids cannot be chosen here")
    try:
        assert process_start(stranger.pid) != identity.start
        assert not identity.alive()
        assert identity.signal(signal.SIGKILL) is False
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


def test_a_signal_reaches_the_process(child):
    identity = Identity.of(child.pid)
    assert identity.signal(0) is True
    assert identity.signal(signal.SIGTERM) is True
    assert child.wait(10) == -signal.SIGTERM
    assert identity.signal(signal.SIGTERM) is False


@pytest.mark.parametrize("refusal", [PermissionError, OSError])
def test_a_signal_reaches_the_process_where_a_sandbox_has_no_pidfds(child, monkeypatch, refusal):
    def refuse(pid: int) -> int:
        raise refusal(38, "not here")

    monkeypatch.setattr(platform.os, "pidfd_open", refuse)
    assert Identity.of(child.pid).signal(signal.SIGTERM) is True
    assert child.wait(10) == -signal.SIGTERM


def test_a_name_with_blanks_and_brackets_does_not_confuse_it(tmp_path):
    odd = tmp_path / ") R 1 (a"
    odd.symlink_to("/bin/cat")
    process = subprocess.Popen([odd], stdin=subprocess.PIPE)
    identity = Identity.of(process.pid)
    eventually(lambda: b") R 1 (a" in Path(f"/proc/{process.pid}/stat").read_bytes())
    assert identity == Identity.of(process.pid)
    assert identity.alive()
    process.communicate()


def test_the_boot_has_a_name_that_stays():
    assert boot_id()
    code = "from syncd.platform import boot_id; print(boot_id())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
    assert done.stdout.strip() == boot_id()


PARENT = """
import subprocess, sys, threading
from syncd.platform import die_with_parent
child = subprocess.Popen(die_with_parent(sys.argv[1:]))
print(child.pid, flush=True)
threading.Event().wait()
"""


def test_a_child_dies_with_its_parent():
    parent = subprocess.Popen([sys.executable, "-c", PARENT, *FOREVER], stdout=subprocess.PIPE)
    child = Identity.of(int(parent.stdout.readline()))
    argv = Path(f"/proc/{child.pid}/cmdline")
    eventually(lambda: argv.read_bytes().startswith(FOREVER[0].encode() + b"\0-c\0"))
    assert child.alive()
    parent.kill()
    parent.communicate()
    eventually(lambda: not child.alive())


def test_a_child_outlives_the_end_of_other_threads_of_its_parent():
    child = subprocess.Popen(die_with_parent(FOREVER))
    other = threading.Thread(target=lambda: None)
    other.start()
    other.join()
    assert child.poll() is None
    child.kill()
    child.wait()


def test_the_launched_program_keeps_process_id_arguments_and_exit_code():
    code = "import os, sys; print(os.getpid(), sys.argv[1]); sys.exit(7)"
    command = die_with_parent([sys.executable, "-c", code, "an 'argument'"])
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    output, _ = process.communicate()
    assert output == f"{process.pid} an 'argument'\n"
    assert process.returncode == 7


def test_a_child_whose_parent_is_gone_already_does_not_start():
    command = die_with_parent(["echo", "started"])
    command[command.index(str(os.getpid()))] = "999999999"
    done = subprocess.run(command, capture_output=True)
    assert (done.returncode, done.stdout) == (1, b"")


def test_a_program_that_is_missing_is_reported():
    done = subprocess.run(die_with_parent(["/none/such"]), capture_output=True)
    assert (done.returncode, done.stderr) == (127, b"/none/such: No such file or directory\n")


def test_a_lock_is_held_by_one_at_a_time(tmp_path):
    lock = tmp_path / "lock"
    busy = pytest.raises(BusyError, match=r"start it: .*lock: process \d+")
    with exclusive_lock(lock, "start it"), busy, exclusive_lock(lock, "start it"):
        pass
    with exclusive_lock(lock, "start it"):
        pass


def test_a_lock_that_is_given_free_soon_is_waited_for(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    with contextlib.ExitStack() as held:
        held.enter_context(exclusive_lock(lock, "start it"))
        threading.Timer(0.2, held.close).start()
        with exclusive_lock(lock, "start it", patience=60.0):
            assert lock.read_text() == f"{os.getpid()}\n"


def test_who_holds_a_lock_is_named_where_that_is_known(tmp_path):
    lock = tmp_path / "lock"
    held = f"lock: process {os.getpid()} holds the lock. Stop that one first."
    with exclusive_lock(lock, "x"):
        with pytest.raises(BusyError, match=held), exclusive_lock(lock, "x"):
            pass
        lock.write_text("")
        unknown = pytest.raises(BusyError, match="another process holds the lock")
        with unknown, exclusive_lock(lock, "x"):
            pass


def test_a_lock_is_lost_when_its_file_is_not_where_it_was(tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    with exclusive_lock(folder / "lock", "x") as lock:
        assert not lock.is_lost()
        folder.rename(tmp_path / "moved")
        assert lock.is_lost()
        folder.mkdir()
        with exclusive_lock(folder / "lock", "x") as other:
            assert (lock.is_lost(), other.is_lost()) == (True, False)
        shutil.rmtree(folder)
        (tmp_path / "moved").rename(folder)
        assert not lock.is_lost()


def test_a_lock_ends_with_its_process_and_not_with_its_children(tmp_path):
    code = (
        "import subprocess, sys, threading; from pathlib import Path;"
        "from syncd.platform import exclusive_lock\n"
        "with exclusive_lock(Path(sys.argv[1]), 'x'):\n"
        " print(subprocess.Popen(sys.argv[2:], stdout=subprocess.DEVNULL).pid, flush=True)\n"
        " threading.Event().wait()"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "lock"), *FOREVER]
    holder = subprocess.Popen(command, stdout=subprocess.PIPE)
    grandchild = Identity.of(int(holder.stdout.readline()))
    with pytest.raises(BusyError), exclusive_lock(tmp_path / "lock", "start it"):
        pass
    holder.kill()
    holder.communicate()
    assert grandchild.alive()
    with exclusive_lock(tmp_path / "lock", "start it"):
        pass
    grandchild.signal(signal.SIGKILL)


def test_the_type_of_a_file_system_is_that_of_the_nearest_mount():
    assert filesystem_type(Path("/proc/self/status")) == "proc"
    assert filesystem_type(Path("/sys/kernel")) == "sysfs"
    assert filesystem_type(Path("/none/such")) == filesystem_type(Path("/"))
