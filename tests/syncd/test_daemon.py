"""What the two daemons share, as a real `syncd watch` shows it: how it ends."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from ends import End, Ends
from waiting import eventually

from protocol.errors import ExitCode


@pytest.fixture
def laptop(tmp_path: Path) -> Iterator[End]:
    """A controller's end that runs."""
    ends = Ends(tmp_path, str(tmp_path / "remote"))
    ends.laptop.start()
    eventually(lambda: "controller c-" in ends.laptop.output.read_text(), within=60)
    yield ends.laptop
    ends.close()


def wrote(end: End, text: str) -> None:
    eventually(lambda: text in end.output.read_text(), within=60, what=end.output.read_text)


@pytest.mark.parametrize("moved", ["", ".syncd"])
def test_one_whose_folder_was_moved_ends_and_says_so(laptop: End, moved: str) -> None:
    root = laptop.layout.root
    (root / moved).rename(root.parent / "moved")
    assert laptop.wait() == ExitCode.DATA
    wrote(laptop, f"{root}: this folder was moved or replaced while it ran. Start it again")
    assert not (root / moved).exists()


def test_it_can_be_started_again_where_the_folder_is_now(laptop: End) -> None:
    moved = laptop.layout.root.parent / "moved"
    laptop.layout.root.rename(moved)
    assert laptop.wait() == ExitCode.DATA
    laptop.layout = type(laptop.layout)(moved)
    laptop.start()
    wrote(laptop, "controller c-")
    assert laptop.stop() == 0


def test_one_whose_rclone_cannot_be_started_again_ends_when_it_is_asked_to(laptop: End) -> None:
    assert laptop.process is not None
    [rclone] = [c for c in psutil.Process(laptop.process.pid).children() if "rcd" in c.cmdline()]
    # Elsewhere than in the folder, if that has too long a path for a socket.
    [address] = [word for word in rclone.cmdline() if word.endswith(".sock")]
    socket = Path(address.removeprefix("unix://"))
    rclone.suspend()
    socket.unlink()
    socket.mkdir()  # in the way of the next one
    os.kill(rclone.pid, signal.SIGKILL)
    wrote(laptop, ".sock: Is a directory")
    with open(laptop.layout.queue, "a") as queue:
        queue.write("run:pretrain\n")
    wrote(laptop, "is command 1: run:pretrain")  # which is to be sent
    laptop.process.terminate()
    assert laptop.wait(20) == 0  # a call alone waits for 30 s
