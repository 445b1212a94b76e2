"""One supervised `rclone rcd`: the process that does every transfer, and calls to it.

    with Rclone(folder / "rclone") as rclone:
        rclone.call("operations/list", {"fs": "drive:", "remote": ""}, timeout=60)

A thread of ours starts the process, reads its stderr into `rclone.log`, and starts it again
whenever it ends; a caller that waits too long for an answer has it killed if it has stopped
answering. The process dies with this one. Calls may come from any number of threads.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import logging
import logging.handlers
import os
import subprocess
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import wait as wait_readable
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import quote

from protocol.errors import DataError, RemoteError
from syncd.platform import Identity, die_with_parent, exclusive_lock
from syncd.rclone_binary import find_rclone
from syncd.rclone_endpoint import Endpoint, endpoint, private_folder
from syncd.rclone_errors import Fatal, Transient, from_answer, shown, where

START_SECONDS = 30.0
PROBE_SECONDS = 15.0  # between looks at whether an rclone that takes its time still answers
STOP_SECONDS = 2.0
READ_SECONDS = 120.0
STABLE_SECONDS = 10.0  # an rclone that lived so long is started again at once
LOG_BYTES = 256 * 1024
MAX_ANSWER_BYTES = 256 * 1024 * 1024

log = logging.getLogger(__name__)

# `timeout` ends a transfer that has stood still; our own time-outs bound the whole call.
_FLAGS = (
    *("--rc-serve", "--ask-password=false", "--log-level", "NOTICE"),
    *("--low-level-retries", "3", "--contimeout", "15s", "--timeout", "60s"),
)


@dataclass(frozen=True)
class _Request:
    """One HTTP request; `what` and `where` are for messages."""

    method: str
    target: str
    what: str
    where: str
    body: bytes | None = None
    headers: Mapping[str, str] = field(default_factory=dict)


class Rclone:
    """The rclone process of one daemon.

    `runtime_dir` is made 0700 and holds socket, lock and log; `config` is rclone's configuration
    file (rclone's own default when None), `bwlimit` its bandwidth limit ("10M", or a timetable).
    """

    def __init__(self, runtime_dir: Path, *, config: Path | None = None, bwlimit: str = "") -> None:
        self._folder = runtime_dir
        self._config = config
        self._bwlimit = bwlimit
        self._state = threading.Condition()
        self._closed = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None  # the one that answers, if any does
        self._failure = ""
        self._restarts = 0
        self._idle: list[http.client.HTTPConnection] = []
        self._cleanup = contextlib.ExitStack()
        self._thread: threading.Thread | None = None
        self._endpoint: Endpoint
        self._binary: Path

    @property
    def restarts(self) -> int:
        """How often the process was started again."""
        return self._restarts

    @property
    def pid(self) -> int | None:
        """The process id of the rclone that answers now, or None between two."""
        with self._state:
            return self._process.pid if self._process else None

    # Life

    def start(self) -> None:
        """Start rclone and wait until it answers.

        Raises BusyError when another daemon uses the folder, RemoteError when rclone is missing,
        too old, or ends at once (with its last line).
        """
        if self._thread is not None:
            raise RuntimeError("an Rclone is started once")
        self._binary = find_rclone()
        folder = private_folder(self._folder)
        with contextlib.ExitStack() as stack:
            stack.enter_context(exclusive_lock(folder / "rclone.lock", "start rclone"))
            self._endpoint = endpoint(folder)
            self._end_orphan()
            stack.callback(self._endpoint.clear)
            self._cleanup = stack.pop_all()
        # The process dies with the thread that starts it, so that thread is one that stays.
        self._thread = threading.Thread(target=self._supervise, name="rclone", daemon=True)
        self._thread.start()
        try:
            self._wait_running(START_SECONDS + STOP_SECONDS, first=True)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End rclone. Calls in other threads end with Fatal. Safe to call twice."""
        self._closed.set()
        with self._state:
            process, idle, self._idle = self._process, self._idle, []
            self._state.notify_all()
        for connection in idle:
            connection.close()
        if process:
            process.terminate()
        if self._thread:
            self._thread.join(STOP_SECONDS)
            if self._thread.is_alive() and process:
                process.kill()
                self._thread.join(STOP_SECONDS)
        self._cleanup.close()

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

    # Calls

    def call(self, verb: str, params: Mapping[str, Any], timeout: float) -> dict[str, Any]:
        """Run one of rclone's remote-control verbs and return its answer.

        Waits for rclone when it is being started again. `timeout`, in seconds, bounds the wait for
        the answer; giving up cancels the operation in rclone. Raises NotFound, Transient (also
        when rclone died meanwhile: the verb may or may not have been carried out) or Fatal.
        """
        request = _Request(
            "POST",
            f"/{verb}",
            f"rclone {verb}",
            where(params),
            json.dumps(params).encode(),
            {"Content-Type": "application/json"},
        )
        status, body = self._exchange(request, timeout, MAX_ANSWER_BYTES)
        if status != 200:
            raise from_answer(request.what, request.where, status, body)
        answer: dict[str, Any] = json.loads(body)
        return answer

    def get(self, remote: str, path: str, *, limit: int, timeout: float = READ_SECONDS) -> bytes:
        """Return the content of the file `path` on `remote`, which must hold no `]`.

        Raises DataError when it is longer than `limit` bytes, else as `call` does.
        """
        target = f"/{quote(f'[{remote}]', safe='')}/{quote(path)}"
        request = _Request("GET", target, "read from the remote", f"{shown(remote)}/{path}")
        status, body = self._exchange(request, timeout, limit)
        if status != 200:
            raise from_answer(request.what, request.where, status, body)
        return body

    def _exchange(self, request: _Request, timeout: float, limit: int) -> tuple[int, bytes]:
        process = self._wait_running(min(timeout, START_SECONDS))
        connection = self._take()
        reusable = False
        try:
            status, body, reusable = self._speak(connection, request, timeout, limit, process)
        except (OSError, http.client.HTTPException) as error:
            if self._closed.is_set():
                raise _closed_error(request) from error
            why = f"no answer within {timeout:.0f} s"
            if not isinstance(error, TimeoutError):
                why = f"rclone went away: {str(error) or type(error).__name__}"
            raise Transient(request.what, path=request.where, why=why) from error
        finally:
            self._give_back(connection, reusable)
        return status, body

    def _speak(
        self,
        connection: http.client.HTTPConnection,
        request: _Request,
        timeout: float,
        limit: int,
        process: subprocess.Popen[bytes],
    ) -> tuple[int, bytes, bool]:
        deadline = time.monotonic() + timeout
        _set_timeout(connection, min(timeout, PROBE_SECONDS))
        headers = {**request.headers, **self._endpoint.headers()}
        connection.request(request.method, request.target, request.body, headers)
        while not wait_readable([connection.sock], min(PROBE_SECONDS, _left(deadline))):
            self._kill_if_silent(process)
            if time.monotonic() >= deadline:
                raise TimeoutError
        sock = connection.sock
        with contextlib.closing(connection.getresponse()) as response:
            body = bytearray()
            while part := response.read(1 << 20):
                body += part
                if len(body) > limit and response.status == 200:
                    why = f"longer than {limit} bytes"
                    raise DataError(request.what, path=request.where, why=why)
                sock.settimeout(_left(deadline))
            if response.length:
                raise http.client.IncompleteRead(b"", response.length)
            return response.status, bytes(body), not response.will_close

    def _take(self) -> http.client.HTTPConnection:
        """Return an idle connection that the other end has not closed, or a new one."""
        while True:
            with self._state:
                if not self._idle:
                    return self._endpoint.connection()
                connection = self._idle.pop()
            # An idle connection has nothing to read, unless its end.
            if connection.sock is not None and not wait_readable([connection.sock], 0):
                return connection
            connection.close()

    def _give_back(self, connection: http.client.HTTPConnection, reusable: bool) -> None:
        with self._state:
            if reusable and not self._closed.is_set():
                self._idle.append(connection)
                return
        connection.close()

    def _wait_running(self, timeout: float, *, first: bool = False) -> subprocess.Popen[bytes]:
        """Return the process that answers. Raises Fatal when closed, else Transient."""
        what = "start rclone" if first else "wait for rclone"
        deadline = time.monotonic() + timeout
        with self._state:
            while self._process is None:
                if self._closed.is_set():
                    why = self._failure or "this connection to rclone was closed"
                    raise Fatal(what, path=self._folder, why=why)
                if not self._state.wait(_left(deadline)) and time.monotonic() >= deadline:
                    why = self._failure or f"it was not ready within {timeout:.0f} s"
                    raise Transient(what, path=self._folder, why=why)
            return self._process

    def _kill_if_silent(self, process: subprocess.Popen[bytes]) -> None:
        if not self._answers(PROBE_SECONDS) and process.poll() is None:
            log.warning("rclone (pid %d) does not answer; starting it again", process.pid)
            process.kill()

    def _answers(self, timeout: float) -> bool:
        connection = self._endpoint.connection()
        try:
            _set_timeout(connection, timeout)
            connection.request("POST", "/rc/noop", b"", self._endpoint.headers())
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
            with self._state:
                self._state.notify_all()

    def _keep_running(self, sink: logging.handlers.RotatingFileHandler) -> None:
        failures = 0
        while True:
            began = time.monotonic()
            ready = self._run_once(sink)
            never_worked = not ready and self._restarts == 0
            if self._closed.is_set() or never_worked:
                return
            log.warning("rclone ended (%s); starting it again", self._failure)
            self._restarts += 1
            stable = time.monotonic() - began > STABLE_SECONDS
            failures = 0 if stable else failures + 1
            if self._closed.wait(min(10.0, 0.05 * 2**failures) if failures else 0.0):
                return

    def _run_once(self, sink: logging.handlers.RotatingFileHandler) -> bool:
        """Run one rclone until it ends; return whether it was ever ready."""
        self._endpoint.clear()
        try:
            process = self._spawn()
        except OSError as error:
            self._failure = f"{self._binary}: {error.strerror}"
            return False
        with process:
            self._record(process)
            ready = self._until_ready(process)
            if ready:
                with self._state:
                    self._process = process
                    self._state.notify_all()
            if not ready or self._closed.is_set():
                process.kill()
            last = _drain(process, sink)
        with self._state:
            self._process = None
            self._failure = last or f"it ended with {process.returncode}"
        return ready

    def _spawn(self) -> subprocess.Popen[bytes]:
        argv = [str(self._binary), "rcd", *self._endpoint.flags(), *_FLAGS]
        if self._config is not None:
            argv += ["--config", str(self._config)]
        if self._bwlimit:
            argv += ["--bwlimit", self._bwlimit]
        environ = {k: v for k, v in os.environ.items() if not k.startswith("RCLONE_RC_")}
        return subprocess.Popen(
            die_with_parent(argv),
            env={**environ, **self._endpoint.environ()},
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
            (self._folder / "rclone.pid").write_text(record, "utf-8")

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
        if orphan.signal(9):
            log.warning("ended rclone (pid %d), left by a daemon that died", orphan.pid)


def _closed_error(request: _Request) -> RemoteError:
    return Fatal(request.what, path=request.where, why="this connection to rclone was closed")


def _left(deadline: float) -> float:
    # Never 0, which would make a socket non-blocking.
    return max(deadline - time.monotonic(), 0.001)


def _set_timeout(connection: http.client.HTTPConnection, seconds: float) -> None:
    connection.timeout = seconds
    if connection.sock is not None:
        connection.sock.settimeout(seconds)


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
