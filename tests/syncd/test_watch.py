"""The watcher, with real files and real events."""

from __future__ import annotations

import logging
import os
import shutil
import threading
from pathlib import Path

import pytest
from waiting import eventually

from syncd import watch
from syncd.watch import Watcher

NEVER = 1000.0  # rescans that do not come: only events can wake


class Wakes:
    """Counts wakes, and waits until there are no more."""

    def __init__(self) -> None:
        self.count = 0
        self._woken = threading.Condition()

    def __call__(self) -> None:
        with self._woken:
            self.count += 1
            self._woken.notify_all()

    def settle(self, quiet: float = 0.15) -> int:
        """Return the count once no wake has come for `quiet` seconds."""
        with self._woken:
            while self._woken.wait(quiet):
                pass
            return self.count

    def more_than(self, count: int) -> None:
        eventually(lambda: self.count > count, what="nothing woke")


@pytest.fixture
def wakes():
    return Wakes()


@pytest.fixture
def root(tmp_path):
    folder = tmp_path / "root"
    folder.mkdir()
    return folder


@pytest.fixture(params=["events", "polling"])
def backend(request, monkeypatch):
    """Runs a test with the system's events, and again as on a network mount."""
    monkeypatch.setattr(watch, "CHECK_SECONDS", NEVER)
    if request.param == "polling":
        monkeypatch.setattr(watch, "needs_polling", lambda folder: True)
        monkeypatch.setattr(watch, "POLL_SECONDS", 0.05)
    return request.param


def test_it_wakes_at_the_start(root, wakes):
    with Watcher([root], wakes, rescan_every=NEVER):
        wakes.more_than(0)


def test_it_wakes_now_and_then_without_any_change(root, wakes):
    with Watcher([root], wakes, rescan_every=0.02):
        wakes.more_than(4)


def test_every_kind_of_change_wakes(backend, root, wakes):
    (root / "below").mkdir()
    (root / "file").write_text("1")

    def replace(path: Path) -> None:
        (root / "new").write_text("replaced")
        os.replace(root / "new", path)

    def append(path: Path) -> None:
        with open(path, "a") as file:
            file.write("more")

    changes = {
        "write": lambda: (root / "file").write_text("rewritten"),
        "append": lambda: append(root / "file"),
        "create": lambda: (root / "another").write_text("1"),
        "create below": lambda: (root / "below" / "file").write_text("1"),
        "atomic rename": lambda: replace(root / "file"),
        "rename below": lambda: replace(root / "below" / "file"),
        "new folder": lambda: (root / "folder").mkdir(),
        "in the new folder": lambda: (root / "folder" / "file").write_text("1"),
        "delete": lambda: (root / "file").unlink(),
        "delete folder": lambda: shutil.rmtree(root / "below"),
    }
    with Watcher([root], wakes, rescan_every=NEVER):
        wakes.more_than(0)
        for change in changes.values():
            before = wakes.settle()
            change()
            wakes.more_than(before)


def test_reading_never_wakes(backend, root, wakes):
    for number in range(20):
        (root / f"file-{number}").write_text("content")
    with Watcher([root], wakes, rescan_every=NEVER):
        wakes.more_than(0)
        before = wakes.settle()
        for _ in range(5):
            for path in root.iterdir():
                assert path.read_text() == "content"
                path.stat()
            with os.scandir(root) as entries:
                assert len(list(entries)) == 20
        assert wakes.settle(0.4) == before
        (root / "file-0").write_text("changed")  # and it would have been seen
        wakes.more_than(before)


def test_a_file_is_watched_through_every_way_of_saving_it(backend, root, wakes):
    queue = root / "queue.txt"
    queue.write_text("run:pretrain\n")

    def as_vim_does() -> None:
        os.rename(queue, root / "queue.txt~")
        queue.write_text("run:finetune\n")
        (root / "queue.txt~").unlink()

    def as_most_editors_do() -> None:
        (root / ".queue.swp").write_text("run:export\n")
        os.replace(root / ".queue.swp", queue)

    def as_a_shell_does() -> None:
        with open(queue, "a") as file:
            file.write("run:gate\n")

    with Watcher([queue], wakes, rescan_every=NEVER):
        wakes.more_than(0)
        for save in (as_vim_does, as_most_editors_do, as_a_shell_does, as_most_editors_do):
            before = wakes.settle()
            save()
            wakes.more_than(before)


def test_a_file_beside_the_watched_one_does_not_wake(root, wakes):
    queue = root / "queue.txt"
    queue.write_text("run:pretrain\n")
    with Watcher([queue], wakes, rescan_every=NEVER):
        wakes.more_than(0)
        before = wakes.settle()
        (root / "other.txt").write_text("1")
        assert wakes.settle() == before


def test_a_root_that_is_deleted_and_made_again_is_watched_again(backend, root, wakes):
    with Watcher([root], wakes, rescan_every=NEVER) as watcher:
        wakes.more_than(0)
        for _ in range(3):
            before = wakes.settle()
            shutil.rmtree(root)
            wakes.more_than(before)
            before = wakes.settle()
            root.mkdir()
            wakes.more_than(before)
            before = wakes.settle()
            (root / "file").write_text("1")
            wakes.more_than(before)
        assert watcher.alive()


def test_a_root_that_is_replaced_in_an_instant_is_watched_again(root, wakes):
    with Watcher([root], wakes, rescan_every=NEVER):
        wakes.more_than(0)
        for _ in range(10):
            before = wakes.settle()
            shutil.rmtree(root)
            root.mkdir()
            wakes.more_than(before)
        before = wakes.settle()
        (root / "file").write_text("1")
        wakes.more_than(before)


def test_a_root_that_is_renamed_away_is_given_up_for_the_one_in_its_place(root, wakes, tmp_path):
    with Watcher([root], wakes, rescan_every=NEVER):
        wakes.more_than(0)
        before = wakes.settle()
        root.rename(tmp_path / "away")
        root.mkdir()
        wakes.more_than(before)
        before = wakes.settle()
        (root / "file").write_text("1")
        wakes.more_than(before)
        before = wakes.settle()
        (tmp_path / "away" / "file").write_text("1")
        assert wakes.settle() == before


def test_a_path_that_is_not_there_yet_is_watched_for(backend, tmp_path, wakes):
    path = tmp_path / "not" / "yet" / "there"
    with Watcher([path], wakes, rescan_every=NEVER):
        wakes.more_than(0)
        before = wakes.settle()
        path.mkdir(parents=True)
        wakes.more_than(before)
        before = wakes.settle()
        (path / "file").write_text("1")
        wakes.more_than(before)


def test_a_link_to_a_folder_is_followed(root, wakes, tmp_path):
    link = tmp_path / "link"
    link.symlink_to(root)
    with Watcher([link], wakes, rescan_every=NEVER):
        wakes.more_than(0)
        before = wakes.settle()
        (root / "file").write_text("1")
        wakes.more_than(before)


def test_without_recursion_what_is_below_does_not_wake(root, wakes):
    (root / "below").mkdir()
    with Watcher([root], wakes, rescan_every=NEVER, recursive=False):
        wakes.more_than(0)
        before = wakes.settle()
        (root / "below" / "file").write_text("1")
        assert wakes.settle() == before
        (root / "file").write_text("1")
        wakes.more_than(before)


def test_after_a_burst_of_20000_creations_the_last_look_sees_them_all(root):
    seen: list[int] = []
    with Watcher([root], lambda: seen.append(len(os.listdir(root))), rescan_every=1.0):
        eventually(lambda: seen)
        for number in range(20_000):
            os.close(os.open(root / str(number), os.O_CREAT | os.O_WRONLY))
        eventually(lambda: seen[-1] == 20_000, within=30)
        assert len(seen) < 10_000  # woken by the burst, not by each event
        (root / "one more").write_text("1")
        eventually(lambda: seen[-1] == 20_001)


def test_an_overflow_wakes_and_watches_anew(root, wakes):
    with Watcher([root], wakes, rescan_every=NEVER) as watcher:
        wakes.more_than(0)
        before = wakes.settle()
        observer = watcher._arms[0]._observer
        logging.getLogger("watchdog.observers.inotify_c").warning("Inotify queue overflowed")
        wakes.more_than(before)
        eventually(lambda: watcher._arms[0]._observer is not observer)
        before = wakes.settle()
        (root / "file").write_text("1")
        wakes.more_than(before)


def test_a_dead_observer_is_replaced(root, wakes):
    with Watcher([root], wakes, rescan_every=NEVER) as watcher:
        wakes.more_than(0)
        dead = watcher._arms[0]._observer
        dead.stop()
        dead.join()
        eventually(lambda: watcher._arms[0]._observer not in (dead, None))
        assert watcher._arms[0]._works()


def test_running_out_of_inotify_watches_falls_back_to_polling(root, wakes, monkeypatch):
    def refuse() -> None:
        raise OSError(28, "inotify watch limit reached")

    monkeypatch.setattr(watch, "Observer", refuse)
    monkeypatch.setattr(watch, "POLL_SECONDS", 0.05)
    with Watcher([root], wakes, rescan_every=NEVER):
        wakes.more_than(0)
        before = wakes.settle()
        (root / "file").write_text("1")
        wakes.more_than(before)


@pytest.mark.parametrize(
    ("kind", "polled"),
    [("fuse.rclone", True), ("fuse", True), ("nfs4", True), ("9p", True), ("ext4", False)],
)
def test_mounts_without_events_are_polled(root, monkeypatch, kind, polled):
    monkeypatch.setattr(watch, "filesystem_type", lambda path: kind)
    assert watch.needs_polling(root) is polled


def test_a_wake_that_raises_is_logged_and_the_next_one_comes(root, caplog):
    calls: list[int] = []

    def wake() -> None:
        calls.append(1)
        raise RuntimeError("of the caller's making")

    with Watcher([root], wake, rescan_every=0.02) as watcher:
        eventually(lambda: len(calls) > 3)
        assert watcher.alive()
    assert "of the caller's making" in caplog.text


def test_nothing_wakes_after_close(root, wakes):
    watcher = Watcher([root], wakes, rescan_every=0.02)
    assert not watcher.alive()
    watcher.start()
    wakes.more_than(0)
    watcher.close()
    assert not watcher.alive()
    count = wakes.count
    (root / "file").write_text("1")
    assert wakes.settle() == count
    watcher.close()
