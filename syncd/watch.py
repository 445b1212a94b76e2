"""Watch files and folders, and wake somebody when they may have changed.

watchdog's events are hints and nothing more: a kernel queue overflows, a root is deleted and made
again, a mount goes away. So whoever is woken looks for himself, and is woken now and then anyway.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from watchdog.events import (
    DirCreatedEvent,
    DirDeletedEvent,
    DirMovedEvent,
    FileClosedEvent,
    FileCreatedEvent,
    FileDeletedEvent,
    FileModifiedEvent,
    FileMovedEvent,
    FileSystemEvent,
    FileSystemEventHandler,
)
from watchdog.observers import Observer
from watchdog.observers.api import BaseObserver
from watchdog.observers.polling import PollingObserver

from syncd.platform import filesystem_type

POLL_SECONDS = 1.0
# How often to see whether what is watched is still what is there: a folder that was renamed, or
# mounted over, gives no event.
CHECK_SECONDS = 5.0
# After a wake the next one waits so long: a burst of events is a few wakes, a single one is quick.
GAP_SECONDS = 0.005
CLOSE_SECONDS = 5.0

log = logging.getLogger(__name__)

# Nothing that reading a file causes, our own reading among it.
_CHANGES: list[type[FileSystemEvent]] = [
    *(FileCreatedEvent, FileModifiedEvent, FileClosedEvent, FileMovedEvent, FileDeletedEvent),
    *(DirCreatedEvent, DirMovedEvent, DirDeletedEvent),
]
# Changes made on another machine, or behind the mount, give no events here.
_REMOTE_TYPES = frozenset(
    {"9p", "afs", "ceph", "cifs", "drvfs", "ncpfs", "nfs", "nfs4", "smb3", "smbfs", "vboxsf"}
)


class Watcher:
    """Calls `wake` at the start, soon after anything under `paths` changed, and every so often.

    A path may be a file or a folder, and may be missing, come and go. `wake` is called in a
    thread of the watcher, must be quick, and may be called for nothing; what it raises is logged.
    """

    def __init__(
        self,
        paths: Iterable[Path],
        wake: Callable[[], None],
        *,
        rescan_every: float = 10.0,
        recursive: bool = True,
    ) -> None:
        self._hint = threading.Event()
        self._closed = threading.Event()
        self._wake = wake
        self._rescan_every = rescan_every
        self._arms = [_Arm(Path(path).absolute(), recursive, self._hint) for path in paths]
        self._thread = threading.Thread(target=self._run, name="watcher", daemon=True)

    def start(self) -> None:
        """Start watching; returns before the first wake."""
        self._thread.start()

    def close(self) -> None:
        """Stop. No wake comes after this returns, unless one has hung for seconds."""
        self._closed.set()
        self._hint.set()
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join(CLOSE_SECONDS)

    def alive(self) -> bool:
        """Whether the watcher runs. What it watches may be missing, or be looked at by polling."""
        return self._thread.is_alive() and not self._closed.is_set()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _run(self) -> None:
        with _overflow_reaches(self._after_overflow):
            due = time.monotonic()
            while not self._closed.is_set():
                hinted = self._hint.is_set()
                self._hint.clear()
                # Armed first: what changes after that makes an event, what changed before it is
                # seen by whoever is woken.
                moved = [arm for arm in self._arms if arm.keep()]
                if hinted or moved or time.monotonic() >= due:
                    self._call_wake()
                    due = time.monotonic() + self._rescan_every
                    self._closed.wait(GAP_SECONDS)
                self._hint.wait(max(0.0, min(CHECK_SECONDS, due - time.monotonic())))
        for arm in self._arms:
            arm.disarm()

    def _call_wake(self) -> None:
        if self._closed.is_set():
            return
        try:
            self._wake()
        except Exception:
            log.exception("a watcher's wake failed")

    def _after_overflow(self) -> None:
        for arm in self._arms:
            arm.stale = True
        self._hint.set()


@dataclass(frozen=True)
class _Place:
    """What to hand to watchdog: a folder that exists, and which folder that is now."""

    folder: Path
    recursive: bool
    device: int
    inode: int
    only: Path | None  # of the events in the folder, those about this path alone


def _place(path: Path, recursive: bool) -> _Place:
    """Return the folder itself, or the nearest folder above a file or a missing path.

    Raises OSError when a folder cannot be looked at, such as a mount that has died.
    """
    # Links are followed by us: inotify, as watchdog uses it, would watch the link.
    at = Path(os.path.realpath(path))
    only: Path | None = None
    while not at.is_dir() and at != at.parent:
        only = only or at
        at = at.parent
    found = at.stat()
    return _Place(at, recursive and only is None, found.st_dev, found.st_ino, only)


class _Arm(FileSystemEventHandler):
    """Keeps one path watched, by an observer of its own."""

    def __init__(self, path: Path, recursive: bool, hint: threading.Event) -> None:
        self.stale = False  # set by any thread: what is watched may be gone
        self._path = path
        self._recursive = recursive
        self._hint = hint
        self._place: _Place | None = None
        self._observer: BaseObserver | None = None

    def keep(self) -> bool:
        """Watch the path as it is now; return whether that is another place than before."""
        try:
            place = _place(self._path, self._recursive)
            if place == self._place and not self.stale and self._works():
                return False
            self.disarm()
            self.stale = False
            self._observer = _observe(place, self)
            self._place = place
            if _place(self._path, self._recursive) != place:
                self._hint.set()  # it changed before the events began: look once more
        except OSError as error:
            # Tried again at the next look; until it works there are the rescans.
            log.debug("cannot watch %s: %s", self._path, error)
            was_armed = self._place is not None
            self.disarm()
            return was_armed
        return True

    def disarm(self) -> None:
        observer, self._observer, self._place = self._observer, None, None
        if observer is not None and observer.is_alive():
            observer.stop()
            observer.join(CLOSE_SECONDS)

    def dispatch(self, event: FileSystemEvent) -> None:
        """Note an event, in watchdog's thread."""
        place = self._place
        if place is None:
            self._hint.set()
            return
        paths = [Path(os.fsdecode(path)) for path in (event.src_path, event.dest_path) if path]
        if place.folder in paths and isinstance(event, DirDeletedEvent | DirMovedEvent):
            # A folder made anew can have the old one's inode, so the place alone would not tell.
            self.stale = True
            self._hint.set()
        elif place.only is None or any(place.only.is_relative_to(path) for path in paths):
            self._hint.set()

    def _works(self) -> bool:
        observer = self._observer
        return (
            observer is not None
            and observer.is_alive()
            and all(emitter.is_alive() for emitter in observer.emitters)
        )


def _observe(place: _Place, handler: FileSystemEventHandler) -> BaseObserver:
    """Return a started observer of a folder: by events, or by polling where there are none.

    Raises OSError when the folder cannot be read.
    """
    if not needs_polling(place.folder):
        try:
            return _started(Observer(), place, handler)
        except FileNotFoundError:
            raise
        except OSError as error:  # out of inotify watches or instances
            log.warning("polling %s, since it cannot be watched: %s", place.folder, error)
    return _started(PollingObserver(timeout=POLL_SECONDS), place, handler)


def _started(
    observer: BaseObserver, place: _Place, handler: FileSystemEventHandler
) -> BaseObserver:
    observer.schedule(handler, str(place.folder), recursive=place.recursive, event_filter=_CHANGES)
    observer.start()
    return observer


def needs_polling(folder: Path) -> bool:
    """Whether a folder is on a network or FUSE mount, where changes may give no events."""
    kind = filesystem_type(folder)
    return kind in _REMOTE_TYPES or kind.startswith("fuse")


class _OverflowHandler(logging.Handler):
    """Hears of an overflow the only way that watchdog tells of it: a warning in its log."""

    def __init__(self, react: Callable[[], None]) -> None:
        super().__init__(logging.WARNING)
        self._react = react

    def emit(self, record: logging.LogRecord) -> None:
        if "overflow" in record.getMessage().lower():
            self._react()


@contextlib.contextmanager
def _overflow_reaches(react: Callable[[], None]) -> Iterator[None]:
    logger, handler = logging.getLogger("watchdog.observers"), _OverflowHandler(react)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
