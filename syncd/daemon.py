"""What the two daemons share: their resources, their threads, and how they start and end.

A daemon is a few loops, each a thread that waits for its event or a timeout and then does one
round. A round that fails says so in `problems` and comes again, with back-off where the remote
was at fault; only being fenced ends the daemon.
"""

from __future__ import annotations

import contextlib
import logging
import math
import signal
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType

from protocol.errors import ConfigError, DataError, RemoteError, UserError
from protocol.messages import Message
from protocol.paths import Layout
from protocol.publish import make_dirs, remove_leftovers
from protocol.wire import Writer
from syncd.config import (
    Settings,
    drop_previous,
    make_private,
    previous_sealer,
    required_key,
    sealer,
)
from syncd.delivery.contents import Contents
from syncd.delivery.link import Link
from syncd.delivery.mirror import Mirror
from syncd.delivery.peers import FencedError
from syncd.holder import note_holder
from syncd.memory import return_what_is_freed
from syncd.platform import Lock, exclusive_lock
from syncd.rclone.address import is_address, parse_address
from syncd.rclone.errors import Unreachable, shown
from syncd.rclone.profiles import Profile
from syncd.rclone.rcd import Rclone
from syncd.rclone.remote import RcloneRemote, Remote, Transient
from syncd.rclone.remotes import Lane, Remotes
from syncd.state import State
from syncd.watch import Watcher

log = logging.getLogger("syncd")

DISCOVER_SECONDS = 5.0
MEND_SECONDS = 60.0
MEND_SOON_SECONDS = 5.0
MIRROR_SECONDS = 2.0
# While nothing goes on, what is done every so often is done once in so many looks at the remote.
IDLE_LOOKS = 10
HOSTED_POLL_SECONDS = 5.0
RESCAN_SECONDS = 10.0
MAX_PAUSE_SECONDS = 30.0
LOCK_SECONDS = 1.0
MOVED_SECONDS = 1.0  # between looks at whether the folder is still where it was
# Where nobody answers, trying burdens nobody.
UNREACHABLE_PAUSE_SECONDS = 4.0
BRIDGE_URL = "bridge url"


@dataclass
class Loop:
    """A thread that does rounds: woken by `wake`, or after `interval()` seconds."""

    name: str
    round: Callable[[], None]
    interval: Callable[[], float]
    wake: threading.Event = field(default_factory=threading.Event)
    rest: float = 0.0  # seconds until the next round, even if it is woken
    failures: int = 0
    pause: float = 0.0  # seconds until it tries again, after a failure
    again: threading.Event = field(default_factory=threading.Event)  # ends that pause


class Daemon(ABC):
    """One end's daemon. Subclasses say what is sent, what is done with what arrives, and more."""

    def __init__(self, layout: Layout, settings: Settings, *, remote: Remote | None = None) -> None:
        """`remote` stands for the one that the settings name, which rclone reaches."""
        self.layout = layout
        self.settings = settings
        self._given_remote = remote
        self.problems: dict[str, str] = {}
        self.fenced: FencedError | None = None
        self._stopping = threading.Event()
        self._lock: Lock | None = None  # while it runs
        self._hurry: Callable[[], None] = lambda: None  # ends the waits for an rclone
        self._discovered = -math.inf
        self._mend_at = time.monotonic() + MEND_SECONDS
        self._look = threading.Event()
        self._hosted: Path | None = None
        self.remotes: Remotes | None = None  # if there are several
        self.mirror: Mirror | None = None
        self._first = 0
        self.push_loop = Loop("push", self._push, self._push_interval)
        self.pull_loop = Loop("pull", self._pull, self._poll_interval)
        self.bulk_loop = Loop("bulk", self._bulk, self.bulk_interval)
        self.main_loop = Loop("main", self.tick, self.tick_interval)
        self.mirror_loop = Loop("mirror", self._mirror, lambda: MIRROR_SECONDS)

    # For subclasses

    @abstractmethod
    def setup(self) -> None:
        """Prepare, after the link is there and before it is opened."""

    @abstractmethod
    def recovered(self) -> None:
        """Called once the link is open: all that predecessors left has been applied."""

    @abstractmethod
    def collect(self, seq: int, budget: int) -> list[Message]:
        """See `link.Outgoing`."""

    @abstractmethod
    def pack_up(self, acked: int) -> None:
        """See `link.Outgoing`."""

    @abstractmethod
    def restate(self) -> Iterable[Message]:
        """See `link.Outgoing`."""

    @abstractmethod
    def unacked(self, acked: int) -> int:
        """See `link.Outgoing`."""

    @abstractmethod
    def kept_objects(self) -> set[str]:
        """See `link.Outgoing`."""

    @abstractmethod
    def make_again(self, lost: set[str]) -> None:
        """See `link.Outgoing`."""

    @abstractmethod
    def apply(self, writer: Writer, message: Message) -> None:
        """See `link.Incoming`."""

    @abstractmethod
    def restart(self, writer: Writer, messages: Sequence[Message]) -> None:
        """See `link.Incoming`."""

    @abstractmethod
    def tick(self) -> None:
        """One round of the main loop."""

    def tick_interval(self) -> float:
        """Seconds until the next round of the main loop, if nothing wakes it."""
        return 0.5

    @abstractmethod
    def bulk(self) -> None:
        """One round of what may take long: large files, both ways."""

    def bulk_interval(self) -> float:
        """Seconds until the next round of the bulk loop, if nothing wakes it."""
        return 2.0

    @abstractmethod
    def is_busy(self) -> bool:
        """Whether anything runs, as far as this end knows."""

    def more_loops(self) -> list[Loop]:
        """Loops that only this end has."""
        return []

    @abstractmethod
    def watched(self) -> list[tuple[Path, Loop]]:
        """Paths whose changes wake a loop."""

    @abstractmethod
    def leave(self) -> None:
        """Called once before the last push."""

    # Life

    def run(self) -> None:
        """Run until a signal. Raises UserError when it cannot start, FencedError when fenced,
        DataError when the folder is not where it was."""
        return_what_is_freed()
        make_private(self.layout)
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._signals())
            self._lock = stack.enter_context(
                exclusive_lock(
                    self.layout.private / "lock",
                    "start syncd watch in this folder",
                    patience=LOCK_SECONDS,
                )
            )
            note_holder(self.layout)
            self.open(stack)
            threads = self._start_threads(stack)
            while not self._stopping.wait(MOVED_SECONDS):
                if self._is_moved():
                    self.stop()
            for loop in self._loops():
                loop.wake.set()
                loop.again.set()
            for thread in threads:
                thread.join()
            if self._is_moved():
                raise DataError(
                    "run syncd watch",
                    path=self.layout.root,
                    why="this folder was moved or replaced while it ran",
                    hint="Start it again where it is now.",
                )
            self._say_goodbye()
            log.info("%s %s has ended", self.settings.role, self.link.writer)
        if self.fenced:
            raise self.fenced

    def open(self, stack: contextlib.ExitStack) -> None:
        """Open everything, and start no thread yet. `stack` closes it."""
        private = self.layout.private
        folders = {name: private / name for name in ("content", "payload", "scratch", "rclone")}
        for folder in (self.layout.inbox, *folders.values(), folders["content"] / "files"):
            make_dirs(folder, mode=0o700 if folder.is_relative_to(private) else 0o755)
        make_dirs(folders["content"] / "payload", mode=0o700)
        for leftover in folders["scratch"].iterdir():
            leftover.unlink()
        for folder in (self.layout.inbox, private):
            remove_leftovers(folder)
        self.state = State(private / "state.db")
        stack.callback(self.state.close)
        self.remote = self._given_remote or self._reached_by_rclone(folders["rclone"], stack)
        if isinstance(self.remote, Remotes):
            self.remotes = self.remote
        self._key = key = required_key(self.layout, self.settings)
        if key is None:
            log.warning("NOT SEALED: no key; whoever can write to the remote can run code.")
        self.sealed = key is not None
        self.link = Link(
            remote=self.remote,
            state=self.state,
            sealer=sealer(key),
            previous=previous_sealer(key),
            role=self.settings.role,
            scratch=folders["scratch"],
            outgoing=self,
            incoming=self,
        )
        if self.remotes:
            self.mirror = Mirror(self.link, self.remotes)
        self.contents = Contents(self.state, folders["content"] / "files", lambda: self.link)
        self.payload_contents = Contents(
            self.state, folders["content"] / "payload", lambda: self.link
        )
        self.setup()
        self._reach()
        self.recovered()
        log.info(
            "%s %s, remote %s", self.settings.role, self.link.writer, shown(self.settings.remote)
        )

    def _reached_by_rclone(self, folder: Path, stack: contextlib.ExitStack) -> Remote:
        config = Path(self.settings.rclone_config) if self.settings.rclone_config else None
        rclone = Rclone(folder, config=config, bwlimit=self.settings.bwlimit)
        self._hurry = rclone.hurry
        self._rclone = stack.enter_context(rclone)
        first = self._remote_at(self.settings.remote)
        if not self.settings.fallback:
            return first
        others = [RcloneRemote(rclone, name) for name in self.settings.fallback]
        self.remotes = Remotes([Lane(remote) for remote in (first, *others)])
        self.use_bridge_at(self.state.get(BRIDGE_URL, ""))
        return self.remotes

    def _remote_at(self, name: str) -> Remote:
        return RcloneRemote(self._rclone, name, treat_as=self.settings.profile)

    def use_bridge_at(self, url: str) -> None:
        """Reach the bridge at this URL too, if this end was told of it by one."""
        if not (url and self.remotes and is_address(self.settings.remote)):
            return
        try:
            name = replace(parse_address(self.settings.remote), url=url).text()
            parse_address(name)
        except ConfigError as error:
            log.warning("the bridge is said to be at %s: %s", url, error.why)
            return
        self.remotes.lanes[0].add_way(self._remote_at(name))

    def _reach(self) -> None:
        """Open the link. A remote that cannot be reached is waited for by an end that is new; one
        that has been at work goes on with what it has, and its loops try again."""
        failures = 0
        while True:
            try:
                self.remote.make_root()
                self.link.open()
                return
            except FencedError as error:
                # The loops start all the same: there may be stages to be stopped.
                self.fence(error)
                return
            except RemoteError as error:
                # One of several that wants a person keeps the others from nothing.
                lasting = not isinstance(error, Transient)
                if lasting and not (self.link.joined and self.remotes):
                    raise
                log.warning("%s", _told(error))
                if self.link.joined:
                    return
                failures += 1
                if self._stopping.wait(_pause(failures, error)):
                    raise

    def _loops(self) -> list[Loop]:
        loops = [self.main_loop, self.push_loop, self.pull_loop, self.bulk_loop, *self.more_loops()]
        return [*loops, self.mirror_loop] if self.mirror else loops

    def _start_threads(self, stack: contextlib.ExitStack) -> list[threading.Thread]:
        watched = self.watched()
        with contextlib.suppress(Transient):  # cannot be reached now, so it is not on this disk
            self._hosted = self.remote.local_path()
        if self._hosted is not None:
            watched.append((self._hosted, self.pull_loop))
        for path, loop in watched:
            watcher = Watcher([path], loop.wake.set, rescan_every=RESCAN_SECONDS)
            stack.enter_context(watcher)
        threads = []
        for loop in self._loops():
            thread = threading.Thread(target=self._work, args=(loop,), name=loop.name)
            thread.start()
            threads.append(thread)
        return threads

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """Take SIGTERM and SIGINT as a request to end."""

        def stop(signum: int, frame: FrameType | None) -> None:
            self.stop()

        before = {s: signal.signal(s, stop) for s in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def stop(self) -> None:
        """Ask the daemon to end."""
        self._stopping.set()
        self._hurry()

    def _is_moved(self) -> bool:
        """Whether this folder is not where it was: another daemon may run on what is there."""
        return self._lock is not None and self._lock.is_lost()

    def _say_goodbye(self) -> None:
        try:
            self.leave()
            for _ in range(100):
                if not self.link.push():
                    break
        except UserError as error:
            log.warning("left without sending everything: %s", error)

    # Loops

    def fence(self, error: FencedError) -> None:
        """Take note that a newer incarnation of this end has taken over."""
        if self.fenced is None:
            log.error("%s", error)
        self.fenced = error
        self.main_loop.wake.set()

    def step(self, loop: Loop) -> None:
        """Do one round of a loop; what goes wrong in it becomes a problem."""
        with self._guarded(loop):
            if not self.layout.inbox.is_dir():
                if self._is_moved():
                    return
                make_dirs(self.layout.inbox)  # someone took it away
            loop.round()

    def _work(self, loop: Loop) -> None:
        while not self._stopping.is_set():
            loop.wake.clear()
            loop.again.clear()
            self.step(loop)
            if loop.failures:
                loop.again.wait(loop.pause)
            elif not self._stopping.wait(loop.rest):
                loop.wake.wait(loop.interval())

    @contextlib.contextmanager
    def _guarded(self, loop: Loop) -> Iterator[None]:
        """Turn a failed round into a problem that is shown, until a round works again."""
        try:
            yield
        except FencedError as error:
            self.fence(error)
        except UserError as error:
            self._note_failure(loop, error, _told(error))
        except OSError as error:
            self._note_failure(loop, error, f"{error.strerror or error}: {error.filename or ''}")
        except Exception as error:
            log.exception("a fault in the %s loop", loop.name)
            self._note_failure(loop, error, f"fault in {loop.name}: {error!r}")
        else:
            self._note_success(loop)

    def _note_failure(self, loop: Loop, error: Exception, why: str) -> None:
        loop.failures = min(loop.failures + 1, 10)
        loop.pause = _pause(loop.failures, error)
        if self.problems.get(loop.name) != why:
            log.warning("%s", why)
        self.problems[loop.name] = why

    def _note_success(self, loop: Loop) -> None:
        if loop.failures:
            log.info("%s works again", loop.name)
            for other in self._loops():  # what kept this one away has kept others away, too
                other.again.set()
        loop.failures = 0
        self.problems.pop(loop.name, None)

    def is_idle(self) -> bool:
        """Whether nothing runs, and nothing has come or gone for long."""
        quiet = time.monotonic() - self.link.last_news
        return quiet > self.settings.idle_after and not self.is_busy()

    def every(self, seconds: float) -> float:
        """How often to do what is done every so many seconds while anything goes on."""
        return max(seconds, IDLE_LOOKS * self._poll()) if self.is_idle() else seconds

    def _poll(self) -> float:
        """How often to look at the remote."""
        if self.is_idle():
            return self.profile.idle_poll_seconds
        return self.settings.poll or self.profile.poll_seconds

    def _push(self) -> None:
        """Send one pack: more come in a round of its own, after they have gathered for a while."""
        sent = self.link.push()
        self.push_loop.rest = self.profile.gather_seconds if sent else 0.0
        if sent:
            self.mirror_loop.wake.set()
            self.push_loop.wake.set()

    @property
    def profile(self) -> Profile:
        """How the remote wants to be used."""
        return self.remote.profile()

    def _push_interval(self) -> float:
        return min(self.link.ack_wait(), RESCAN_SECONDS)

    def _bulk(self) -> None:
        if self.fenced:
            return  # what it has does not count any more
        self.bulk()
        self._end_rotation()

    def _mirror(self) -> None:
        if self.mirror:
            self.mirror.round()

    def _end_rotation(self) -> None:
        """Drop the previous key once nothing that is still needed is sealed by it."""
        keys, key = self.link.keys, self._key
        if key is None or not key.previous:
            return
        if keys.previous is not None:
            if not self.link.is_rotated():
                return
            keys.retire()
            log.info("the new key is in use at both ends: what the old one seals is refused")
        if drop_previous(self.layout, key):
            log.info("took the old key out of %s", self.layout.key)
        self._key = replace(key, previous=b"")

    def look_for_writers(self) -> None:
        """Have the next round of the pull loop, which comes at once, look for new writers."""
        self._look.set()
        self.pull_loop.wake.set()

    def _pull(self) -> None:
        self._mend()
        due = time.monotonic() - self._discovered > self.every(DISCOVER_SECONDS)
        if due or self._look.is_set() or self.link.peers.newest() is None:
            thorough = self._look.is_set()
            self._look.clear()
            self.link.discover(thorough=thorough)
            self._discovered = time.monotonic()
            if thorough:
                self.main_loop.wake.set()  # it is what has asked
        if self.link.pull():
            self.main_loop.wake.set()
            self.bulk_loop.wake.set()
            self.push_loop.wake.set()

    def _mend(self) -> None:
        """See now and then whether all that was sent is there."""
        now, first = time.monotonic(), self.remotes.first if self.remotes else 0
        if first != self._first:
            # What only another remote has, and was not copied in time, has to be said again; soon,
            # for what is missing twice is missing.
            self.link.mend()
            self._first, self._mend_at = first, now + MEND_SOON_SECONDS
        elif now > self._mend_at:
            self.link.mend()
            self._mend_at = now + self.every(MEND_SECONDS)

    def _poll_interval(self) -> float:
        if self._hosted is None:
            return self._poll()
        # A watcher wakes it, but not for what others of several remotes show.
        return MIRROR_SECONDS if self.remotes else HOSTED_POLL_SECONDS

    def refusals(self) -> list[str]:
        """Say what was refused of what arrived, and what has not arrived."""
        told = self.link.refusals.told()
        return ([told] if told else []) + self.link.waits()


def _told(error: UserError) -> str:
    """Return an error with what is done about it, where that is to try again soon."""
    again = " It is tried again every few seconds." if isinstance(error, Unreachable) else ""
    return f"{error}{again}"


def _pause(failures: int, error: Exception) -> float:
    """Seconds until what has failed so many times in a row is tried again."""
    most = UNREACHABLE_PAUSE_SECONDS if isinstance(error, Unreachable) else MAX_PAUSE_SECONDS
    return min(0.5 * (1 << failures), most)
