"""`syncd bridge` as a process that a test may kill and start again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
from servers import free_port
from waiting import eventually

from protocol.paths import Layout
from syncd.bridge import bridge_folder
from syncd.bridge.told import worker_remote


class BridgeProcess:
    """The bridge of a laptop's folder, on a port that it keeps."""

    def __init__(self, layout: Layout, *arguments: str) -> None:
        self.layout = layout
        self.port = free_port()
        self.arguments = list(arguments)
        self._output = layout.root.with_suffix(".bridge")
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def password(self) -> str:
        return (bridge_folder(self.layout) / "password").read_text().strip()

    @property
    def remote(self) -> str:
        """What a worker is given, once the bridge has run."""
        return worker_remote(self.url, self.password)

    def start(self) -> None:
        """Start it, and wait until it says that it is ready."""
        known = len(self.lines())
        environ = {k: v for k, v in os.environ.items() if not k.startswith("SYNCD_")}
        command = [sys.executable, "-m", "syncd", "bridge", "-C", str(self.layout.root), "--json"]
        command += ["--address", f"127.0.0.1:{self.port}", *self.arguments]
        with open(self._output, "ab") as output, open(self.log, "ab") as log:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=log,
                env=environ,
                start_new_session=True,
            )
        try:
            eventually(lambda: len(self.lines()) > known, within=60, what=self._told)
        except BaseException:
            self.kill()
            raise

    @property
    def log(self) -> Path:
        return self.layout.root.with_suffix(".bridge.log")

    def lines(self) -> list[dict[str, Any]]:
        """The lines of JSON that it has printed."""
        text = self._output.read_text() if self._output.exists() else ""
        return [json.loads(line) for line in text.splitlines()]

    def server_pid(self) -> int:
        """The process id of its rclone, as soon as there is one."""
        assert self.process is not None
        return eventually(self._find_server, within=30)

    def _find_server(self) -> int | None:
        assert self.process is not None
        children = psutil.Process(self.process.pid).children()
        return next((c.pid for c in children if "webdav" in c.cmdline()), None)

    def kill(self) -> None:
        """SIGKILL it."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Ask it to end; return its exit code."""
        assert self.process is not None
        self.process.send_signal(number)
        code = self.process.wait(60)
        self.process = None
        return code

    def _told(self) -> str:
        return f"the bridge is not ready\n{self.log.read_text()}"
