"""Calls to the one `rclone rcd` that does every transfer, from any number of threads.

    with Rclone(folder / "rclone") as rclone:
        rclone.call("operations/list", {"fs": "drive:", "remote": ""}, timeout=60)

`syncd.rclone.process` keeps it running; a caller that waits long for an answer looks whether it
still answers at all, and has it started again if not.
"""

from __future__ import annotations

import contextlib
import http.client
import json
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

from protocol.errors import DataError
from syncd.rclone.errors import (
    NOBODY_ANSWERS,
    Fatal,
    Transient,
    Unreachable,
    from_answer,
    shown,
    where,
)
from syncd.rclone.process import START_SECONDS, RcloneProcess

PROBE_SECONDS = 15.0  # between looks at whether an rclone that takes its time still answers
ANSWER_SECONDS = 10.0  # that it has for showing it
READ_SECONDS = 120.0
MAX_ANSWER_BYTES = 256 * 1024 * 1024


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
    """The rclone of one daemon.

    `runtime_dir` is made 0700 and holds its socket, lock and log; `config` is rclone's
    configuration file (rclone's own default when None), `bwlimit` its bandwidth limit ("10M", or a
    timetable).
    """

    def __init__(self, runtime_dir: Path, *, config: Path | None = None, bwlimit: str = "") -> None:
        self._process = RcloneProcess(runtime_dir, config=config, bwlimit=bwlimit)
        self._lock = threading.Lock()
        self._idle: list[http.client.HTTPConnection] = []

    @property
    def restarts(self) -> int:
        """How often rclone was started again."""
        return self._process.restarts

    @property
    def pid(self) -> int | None:
        """The process id of the rclone that answers now, or None between two."""
        return self._process.pid

    def start(self) -> None:
        """Start rclone and wait until it answers.

        Raises BusyError when another daemon uses the folder, RemoteError when rclone is missing,
        too old, or ends at once (with its last line).
        """
        self._process.start()

    def hurry(self) -> None:
        """Let no call wait any more for an rclone that does not run; `close` comes soon."""
        self._process.hurry()

    def close(self) -> None:
        """End rclone. Calls in other threads end with Fatal. Safe to call twice."""
        self._process.close()
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

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
        process = self._process.wait(min(timeout, START_SECONDS))
        connection = self._take()
        reusable = False
        try:
            deadline = time.monotonic() + timeout
            self._send(connection, request, deadline, process)
            status, body, reusable = _receive(connection, request, deadline, limit)
        except (OSError, http.client.HTTPException) as error:
            if self._process.closed:
                why = "the connection to rclone was closed"
                raise Fatal(request.what, path=request.where, why=why) from error
            if isinstance(error, TimeoutError):
                why = f"no answer within {timeout:.0f} s"
                raise Unreachable(
                    request.what, path=request.where, why=why, hint=NOBODY_ANSWERS
                ) from error
            # Or it runs and cannot be reached: its socket was taken away.
            self._process.kill_if_silent(process, ANSWER_SECONDS)
            why = f"rclone went away: {str(error) or type(error).__name__}"
            raise Transient(request.what, path=request.where, why=why) from error
        finally:
            self._give_back(connection, reusable)
        return status, body

    def _send(
        self,
        connection: http.client.HTTPConnection,
        request: _Request,
        deadline: float,
        process: subprocess.Popen[bytes],
    ) -> None:
        """Send a request and wait until its answer begins. Raises TimeoutError."""
        connection.timeout = min(PROBE_SECONDS, _left(deadline))
        if connection.sock is not None:
            connection.sock.settimeout(connection.timeout)
        headers = {**request.headers, **self._process.endpoint.headers()}
        connection.request(request.method, request.target, request.body, headers)
        while not wait_readable([connection.sock], min(PROBE_SECONDS, _left(deadline))):
            self._process.kill_if_silent(process, ANSWER_SECONDS)
            if time.monotonic() >= deadline:
                raise TimeoutError

    def _take(self) -> http.client.HTTPConnection:
        """Return an idle connection that the other end has not closed, or a new one."""
        while True:
            with self._lock:
                if not self._idle:
                    return self._process.endpoint.connection()
                connection = self._idle.pop()
            # An idle connection has nothing to read, unless its end.
            if connection.sock is not None and not wait_readable([connection.sock], 0):
                return connection
            connection.close()

    def _give_back(self, connection: http.client.HTTPConnection, reusable: bool) -> None:
        with self._lock:
            if reusable and not self._process.closed:
                self._idle.append(connection)
                return
        connection.close()


def _receive(
    connection: http.client.HTTPConnection, request: _Request, deadline: float, limit: int
) -> tuple[int, bytes, bool]:
    """Return status, body, and whether the connection can be used again.

    Raises DataError when a successful answer is longer than `limit`.
    """
    sock = connection.sock
    sock.settimeout(_left(deadline))
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


def _left(deadline: float) -> float:
    # Never 0, which would make a socket non-blocking.
    return max(deadline - time.monotonic(), 0.001)
