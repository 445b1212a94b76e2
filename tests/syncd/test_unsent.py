"""What waits to be sent, and for how long, when the remote stands still."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from ends import Ends
from servers import WebdavServer
from waiting import eventually

from syncd import unsent
from syncd.cli import main
from syncd.unsent import Unsent, UnsentFile, WaitingSince
from syncd.view import read_unsent

# Less than what a heartbeat and an acknowledgement take would say little.
LITTLE = 50_000


@contextlib.contextmanager
def standing_still(server: WebdavServer) -> Iterator[None]:
    """Have a server answer nothing, with its connections open."""
    assert server.process is not None
    os.kill(server.process.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(server.process.pid, signal.SIGCONT)


@pytest.fixture
def far_ends(tmp_path: Path, webdav: WebdavServer, rclone_config: Path) -> Iterator[Ends]:
    rclone_config.write_text(webdav.section("there"))
    both = Ends(tmp_path, webdav.fs("there"), rclone_config=str(rclone_config))
    both.serve(stages='[stages.hello]\ncommand = "echo hello"\ngpu = 0\n')
    yield both
    both.close()


def test_both_ends_tell_what_waits_while_the_remote_stands_still(
    far_ends: Ends, webdav: WebdavServer, capsys: pytest.CaptureFixture[str]
) -> None:
    ends = far_ends
    vm = ends.new_vm().layout
    ends.laptop.start()
    ends.vm.start()
    ends.sh("echo on; while [ ! -e go ]; do sleep 0.1; done; seq 100000; sleep 1000")
    ends.started(1)
    laptop = ends.laptop.layout
    with standing_still(webdav):
        (vm.root / "go").touch()
        ends.append("run:hello", "run:hello", "run:hello")
        (laptop.serve / "large").write_bytes(os.urandom(3 * 2**20))

        status = vm.private / "status.json"
        first = eventually(lambda: waiting(status), within=60, what="the worker tells of nothing")
        # The same since, later: it is not begun anew while nothing gets through.
        eventually(lambda: (waiting(status) or {}).get("time", 0) > first["time"] + 2, within=60)
        again = waiting(status)
        assert again is not None
        assert again["unsent_since"] == first["unsent_since"]
        assert again["unsent_bytes"] > LITTLE
        assert "to be sent" in vm.status.read_text()

        here = eventually(
            lambda: (found := read_unsent(laptop)) and found.bytes > 3 * 2**20 and found,
            within=60,
            what="the laptop tells of nothing",
        )
        assert here.commands == 3
        assert main(["status", "-C", str(laptop.root)]) == 0
        assert "to be sent from here: 3 commands, 3." in capsys.readouterr().out
    eventually(lambda: read_unsent(laptop) is None, within=90, what="it waits still, it says")
    eventually(lambda: not waiting(status), within=90, what="the worker has not sent it")
    ends.ended(4)


def test_a_file_that_is_on_its_way_waits_to_be_sent(
    far_ends: Ends,
) -> None:
    ends = far_ends
    ends.serve(
        stages=f"""
[stages.make]
command = "head -c {8 * 2**20} /dev/urandom > $SYNCD_ARTIFACT_DIR/weights"
gpu = 0
"""
    )
    vm = ends.new_vm()
    vm.environ["SYNCD_BWLIMIT"] = "1M"
    ends.laptop.start()
    vm.start()
    ends.append("run:make")
    told = eventually(
        lambda: (
            (f := waiting(vm.layout.private / "status.json")) and f["unsent_bytes"] > 2**20 and f
        ),
        within=60,
        what="the worker tells of nothing",
    )
    assert told["unsent_bytes"] <= 9 * 2**20
    assert "to be sent" in vm.layout.status.read_text()


def waiting(status: Path) -> dict[str, float] | None:
    """A worker's status once it tells of much that waits."""
    found = json.loads(status.read_text()) if status.exists() else {}
    return found if found.get("unsent_bytes", 0) > LITTLE else None


def test_a_flow_that_gets_through_waits_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(unsent.time, "time", lambda: now)
    since = WaitingSince()
    assert since.update(waits=False, progress=1) is None
    assert since.update(waits=True, progress=1) == 100.0
    now = 105.0
    assert since.update(waits=True, progress=1) == 100.0
    assert since.update(waits=True, progress=2) == 105.0
    assert since.update(waits=False, progress=2) is None
    now = 110.0
    assert since.update(waits=True, progress=2) == 110.0


def test_what_goes_soon_makes_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(unsent.time, "time", lambda: now)
    path = tmp_path / "unsent.json"
    path.write_text("{}")  # of a daemon that was killed
    file = UnsentFile(path)
    file.update(waits=True, progress=0, measure=lambda: (1, 2))
    assert not path.exists()
    now = 103.0
    file.update(waits=True, progress=0, measure=lambda: (1, 2))
    assert json.loads(path.read_bytes()) == {"commands": 1, "bytes": 2, "since": 100.0}
    file.update(waits=False, progress=0, measure=lambda: (0, 0))
    assert not path.exists()


@pytest.mark.parametrize(
    ("commands", "told"),
    [
        (0, "to be sent from here: 12.0 MiB, waiting for 2 min 5 s"),
        (1, "to be sent from here: 1 command, 12.0 MiB, waiting for 2 min 5 s"),
        (3, "to be sent from here: 3 commands, 12.0 MiB, waiting for 2 min 5 s"),
    ],
)
def test_it_is_told_in_one_line(commands: int, told: str) -> None:
    assert Unsent(commands=commands, bytes=12 * 2**20, since=1000.0).told(1125.0) == told
