"""The supervised `rclone rcd` process: started, kept running, ended.

A thread of ours starts it, reads its stderr into `rclone.log`, and starts it again whenever it
ends. It dies with this process, also when that is killed.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import logging
import logging.handlers
import os
import signal
import subprocess
import threading
import time
from pathlib import Path

from protocol.publish import publish_bytes, remove_leftovers
from syncd.platform import Identity, die_with_parent, exclusive_lock
from syncd.rclone.binary import find_rclone
from syncd.rclone.endpoint import Endpoint, endpoint, private_folder
from syncd.rclone.errors import Fatal, Transient

START_SECONDS = 30.0
STOP_SECONDS = 2.0
STABLE_SECONDS = 10.0  # one that lived so long is started again at once
LOG_BYTES = 256 * 1024

log = logging.getLogger(__name__)

# `timeout` ends a transfer that has stood still; the callers' time-outs bound the whole of it.
_FLAGS = (
    *("--rc-serve", "--ask-password=false", "--log-level", "NOTICE"),
    *("--low-level-retries", "3", "--contimeout", "15s", "--timeout", "60s"),
)


class RcloneProcess:
    """One daemon's rclone. `folder` is made 0700 and holds its socket, lock and log."""

    endpoint: Endpoint  # set by `start`
    _binary: Path

    def __init__(self, folder: Path, *, config: Path | None, bwlimit: str) -> None:
        self.restarts = 0
        self._folder = folder
        self._config = config
        self._bwlimit = bwlimit
        self._changed = threading.Condition()
        self._closed = threading.Event()
        self._running: subprocess.Popen[bytes] | None = None  # the one that answers, if any does
        self._failure = ""
        self._by_signal = False  # whether the last one was ended by one
        self._thread: threading.Thread | None = None
        self._cleanup = contextlib.ExitStack()

    @property
    def closed(self) -> bool:
        """Whether no rclone runs, nor will."""
        return self._closed.is_set()

    @property
    def pid(self) -> int | None:
        """The process id of the one that answers now, or None between two."""
        with self._changed:
            return self._running.pid if self._running else None

    def start(self) -> None:
        """Start rclone and wait until it answers.

        Raises BusyError when another daemon uses the folder, RemoteError when rclone is missing,
        too old, or ends at once (with its last line).
        """
        if self._thread is not None:
            raise RuntimeError("an rclone process is started once")
        self._binary = find_rclone()
        folder = private_folder(self._folder)
        with contextlib.ExitStack() as stack:
            stack.enter_context(exclusive_lock(folder / "rclone.lock", "start rclone"))
            remove_leftovers(folder)
            self.endpoint = endpoint(folder)
            self._end_orphan()
            stack.callback(self.endpoint.clear)
            self._cleanup = stack.pop_all()
        # rclone dies with the thread that starts it, so that thread is one that stays.
        self._thread = threading.Thread(target=self._supervise, name="rclone", daemon=True)
        self._thread.start()
        try:
            self.wait(START_SECONDS + STOP_SECONDS)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End rclone and give the folder free. Safe to call twice."""
        self._closed.set()
        with self._changed:
            running = self._running
            self._changed.notify_all()
        if running:
            running.terminate()
        if self._thread:
            self._thread.join(STOP_SECONDS)
            if self._thread.is_alive() and running:
                running.kill()
                self._thread.join(STOP_SECONDS)
        self._cleanup.close()

    def wait(self, timeout: float) -> subprocess.Popen[bytes]:
        """Return the process that answers, at once or after a restart.

        Raises Fatal when closed, Transient after `timeout` seconds.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._running or self.closed, timeout)
            if self._running:
                return self._running
            if self.closed:
                why = self._failure or "it was closed"
                raise Fatal("start rclone", path=self._folder, why=why)
            why = self._failure or f"it was not ready within {timeout:.0f} s"
            raise Transient("start rclone", path=self._folder, why=why)

    def kill_if_silent(self, process: subprocess.Popen[bytes], timeout: float) -> None:
        """Kill a process that does not answer `rc/noop` within `timeout` seconds."""
        if not self._answers(timeout) and process.poll() is None:
            log.warning("rclone (pid %d) does not answer; starting it again", process.pid)
            process.kill()

    def _answers(self, timeout: float) -> bool:
        connection = self.endpoint.connection()
        connection.timeout = timeout
        try:
            connection.request("POST", "/rc/noop", b"", self.endpoint.headers())
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    # The thread that owns the process

    def _supervise(self) -> None:
        try:
            with contextlib.closing(_bounded_log(self._folder / "rclone.log")) as sink:
                self._keep_running(sink)
        except BaseException as error:
            self._failure = f"the thread that runs rclone failed: {error}"
            raise
        finally:
            self._closed.set()
            with self._changed:
                self._running = None
                self._changed.notify_all()

    def _keep_running(self, sink: logging.handlers.RotatingFileHandler) -> None:
        failures = 0
        ever_ready = False
        while True:
            began = time.monotonic()
            ever_ready |= self._run_once(sink)
            # One that never worked is tried once more; for as long as `start` waits, if a signal
            # ended it: then it was killed, and nothing is wrong with it.
            if self.closed or (not ever_ready and failures > 0 and not self._by_signal):
                return
            log.warning("rclone ended (%s); starting it again", self._failure)
            self.restarts += 1
            stable = time.monotonic() - began > STABLE_SECONDS
            failures = 0 if stable else failures + 1
            if self._closed.wait(min(10.0, 0.05 * 2**failures) if failures else 0.0):
                return

    def _run_once(self, sink: logging.handlers.RotatingFileHandler) -> bool:
        """Run one rclone until it ends; return whether it was ever ready."""
        self.endpoint.clear()
        try:
            process = self._spawn()
        except OSError as error:
            self._failure = f"{self._binary}: {error.strerror}"
            self._by_signal = False
            return False
        with process:
            try:
                self._record(process)
                ready = self._until_ready(process)
                if ready:
                    with self._changed:
                        self._running = process
                        self._changed.notify_all()
                if not ready or self.closed:
                    process.kill()
                last = _drain(process, sink)
            except BaseException:
                process.kill()  # or leaving the block would wait for it
                raise
        with self._changed:
            self._running = None
            self._failure = last or f"it ended with {process.returncode}"
            self._by_signal = process.returncode < 0
        return ready

    def _spawn(self) -> subprocess.Popen[bytes]:
        argv = [str(self._binary), "rcd", *self.endpoint.flags(), *_FLAGS]
        if self._config is not None:
            argv += ["--config", str(self._config)]
        if self._bwlimit:
            argv += ["--bwlimit", self._bwlimit]
        # Ours are not for it, the key in one of them least of all.
        foreign = ("RCLONE_RC_", "SYNCD_")
        environ = {k: v for k, v in os.environ.items() if not k.startswith(foreign)}
        return subprocess.Popen(
            die_with_parent(argv),
            env={**environ, **self.endpoint.environ()},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,  # an interrupt is for the daemon, which closes rclone last
        )

    def _record(self, process: subprocess.Popen[bytes]) -> None:
        """Note which process this is, for `_end_orphan` of a later daemon."""
        identity = Identity.of(process.pid)
        if identity:
            record = json.dumps([identity.pid, identity.start, identity.boot])
            publish_bytes(self._folder / "rclone.pid", record.encode("utf-8"), mode=0o600)

    def _until_ready(self, process: subprocess.Popen[bytes]) -> bool:
        deadline = time.monotonic() + START_SECONDS
        while process.poll() is None and time.monotonic() < deadline:
            if self._answers(1.0):
                return True
            if self._closed.wait(0.01):
                return False
        return False

    def _end_orphan(self) -> None:
        """Kill the rclone of a daemon that died where there is no parent-death signal."""
        try:
            record = json.loads((self._folder / "rclone.pid").read_text("utf-8"))
            orphan = Identity(int(record[0]), str(record[1]), str(record[2]))
        except (FileNotFoundError, ValueError, TypeError, LookupError):
            return
        if orphan.signal(getattr(signal, "SIGKILL", signal.SIGTERM)):
            log.warning("ended rclone (pid %d), left by a daemon that died", orphan.pid)


def _bounded_log(path: Path) -> logging.handlers.RotatingFileHandler:
    """Return a writer of lines to `path`, readable by us alone, cut off at LOG_BYTES."""
    path.touch(mode=0o600)
    return logging.handlers.RotatingFileHandler(
        path, maxBytes=LOG_BYTES, backupCount=1, encoding="utf-8"
    )


def _drain(process: subprocess.Popen[bytes], sink: logging.handlers.RotatingFileHandler) -> str:
    """Copy rclone's stderr to the log until it ends; return its last line."""
    last = ""
    for raw in process.stderr or ():
        last = raw.decode("utf-8", "replace").rstrip()
        sink.emit(logging.LogRecord("rclone", logging.INFO, "", 0, last, None, None))
    return last
