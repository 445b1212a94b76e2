"""The supervised `rclone rcd` process: how it is started, and when it works.

`syncd.child` keeps it running. What it prints is in `rclone.log` in its folder.
"""

from __future__ import annotations

import http.client
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

from syncd.child import STOP_SECONDS, Child
from syncd.rclone.binary import find_rclone
from syncd.rclone.endpoint import Endpoint, endpoint, private_folder
from syncd.rclone.errors import Fatal, Transient
from syncd.rclone.profiles import ENVIRONMENT

START_SECONDS = 30.0

# `timeout` ends a transfer that has stood still, on a link that lets packets vanish: it is tried
# again by a new connection, as is one that is not made within `contimeout`. Both bound how long the
# return of a link goes unnoticed (TCP itself doubles its pauses, up to minutes), and must be longer
# than a slow server takes to answer. The callers' time-outs bound the whole of a transfer.
_FLAGS = (
    *("--rc-serve", "--ask-password=false", "--log-level", "NOTICE"),
    *("--low-level-retries", "3", "--contimeout", "8s", "--timeout", "30s"),
)


class RcloneProcess(Child):
    """One daemon's rclone. `folder` is made 0700 and holds its socket, lock and log."""

    name = "rclone"
    start_seconds = START_SECONDS
    foreign = ("RCLONE_RC_",)
    endpoint: Endpoint  # set by `start`
    _binary: Path

    def __init__(self, folder: Path, *, config: Path | None, bwlimit: str) -> None:
        super().__init__(folder)
        self._config = config
        self._bwlimit = bwlimit

    def start(self) -> None:
        """Start rclone and wait until it answers.

        Raises BusyError when another daemon uses the folder, RemoteError when rclone is missing,
        too old, or ends at once (with its last line).
        """
        self._binary = find_rclone()
        self.endpoint = endpoint(private_folder(self.folder))
        super().start()
        try:
            self.wait(START_SECONDS + STOP_SECONDS)
        except BaseException:
            self.close()
            raise

    def wait(self, timeout: float) -> subprocess.Popen[bytes]:
        """Return the process that answers, at once or after a restart.

        Raises Fatal when closed, Transient after `timeout` seconds.
        """
        running = self.working(timeout)
        if running:
            return running
        if self.closed:
            why = self.failure or "it was closed"
            raise Fatal("start rclone", path=self.folder, why=why)
        late = "it is about to be closed" if self.hurried else f"not ready within {timeout:.0f} s"
        why = self.failure or late
        raise Transient("start rclone", path=self.folder, why=why)

    def prepare(self) -> None:
        self.endpoint.clear()

    def tidy(self) -> None:
        self.endpoint.remove()

    def command(self) -> list[str]:
        argv = [str(self._binary), "rcd", *self.endpoint.flags(), *_FLAGS]
        if self._config is not None:
            argv += ["--config", str(self._config)]
        if self._bwlimit:
            # Bytes are let through in the order in which they were asked for, and a read-ahead asks
            # for MiBs at once: with it a status waited for half a minute at 200 KiB/s, without for
            # little more than a second (docs/benchmarks.md).
            argv += ["--bwlimit", self._bwlimit, "--buffer-size", "0"]
        return argv

    def environ(self) -> Mapping[str, str]:
        defaults = {k: v for k, v in ENVIRONMENT.items() if k not in os.environ}
        return {**defaults, **self.endpoint.environ()}

    def answers(self, timeout: float) -> bool:
        connection = self.endpoint.connection()
        connection.timeout = timeout
        try:
            connection.request("POST", "/rc/noop", b"", self.endpoint.headers())
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()
