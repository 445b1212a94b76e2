"""What syncd is compared with, measured in the same run over the same server.

- `ScriptLoop`: `rclone sync` both ways in a loop, as a person would script it. It does not pause
  between rounds, so it is as quick, and asks as much of the remote, as such a loop can.
- `old_waits`: the system before, in which a daemon asked for commands every 30 s and another one
  pushed whole logs every 60 s. What a message waits for the next round is computed; what it takes
  to carry it then is measured.
"""

from __future__ import annotations

import base64
import contextlib
import os
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from protocol.publish import make_dirs, publish_bytes
from syncd.bench.server import ROUND_TRIP, Server, clean_environment, serve_webdav
from syncd.bench.slow_link import SlowLink
from syncd.rclone.binary import find_rclone

LOOP = "rclone sync in a loop without pause"
OLD = "30 s and 60 s polls (computed)"
COMMAND_POLL_SECONDS = 30.0
STATUS_PUSH_SECONDS = 60.0
# What the old daemons asked of the remote: queue.txt every 30 s; log, results and status each 60 s.
OLD_CALLS_A_MINUTE = 60 / COMMAND_POLL_SECONDS + 3 * 60 / STATUS_PUSH_SECONDS


def rclone(config: Path, *arguments: str | Path, check: bool = False) -> float:
    """Run rclone on the command line; return the seconds that it took."""
    began = time.monotonic()
    subprocess.run(
        [find_rclone(), *arguments, "--config", config],
        env=clean_environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        check=check,
    )
    return time.monotonic() - began


class ScriptLoop:
    """The scripted loop. Controller's files lie in `down/` on the remote, the worker's in `up/`.

    The laptop serves its own disk, so it needs no loop; with `laptop_config` it is away from the
    server, and has one as well.
    """

    def __init__(
        self,
        folder: Path,
        served: Path,
        config: Path,
        stages: Mapping[str, Sequence[str]],
        *,
        laptop_config: Path | None = None,
    ) -> None:
        self._folder = folder
        self._config = config
        self._laptop_config = laptop_config
        self._stages = stages
        self._laptop = folder / "laptop" if laptop_config else served
        self._stop = threading.Event()
        self._taken = 0
        self._running: list[subprocess.Popen[bytes]] = []
        self.rounds = 0
        for place in (served, self._laptop, folder / "vm"):
            for name in ("down", "up"):
                make_dirs(place / name)
        make_dirs(self.marks)

    @property
    def marks(self) -> Path:
        return self._folder / "marks"

    def append(self, line: str) -> None:
        """Append a line to the laptop's queue."""
        with open(self._laptop / "down" / "queue.txt", "a", encoding="utf-8") as queue:
            queue.write(f"{line}\n")

    def log(self, stage: str) -> Path:
        """A stage's log, as the laptop has it."""
        return self._laptop / "up" / f"{stage}.log"

    def finish(self, number: int) -> None:
        """Wait until a command has ended: here, its process."""
        self._running[number - 1].wait()

    @contextlib.contextmanager
    def running(self) -> Iterator[ScriptLoop]:
        rounds = [self._worker_round, *([self._laptop_round] if self._laptop_config else [])]
        threads = [threading.Thread(target=self._loop, args=(each,)) for each in rounds]
        for thread in threads:
            thread.start()
        try:
            yield self
        finally:
            self._stop.set()
            for thread in threads:
                thread.join()
            for process in self._running:
                process.kill()
                process.wait()

    def _loop(self, round_: Callable[[], None]) -> None:
        while not self._stop.is_set():
            round_()
            self.rounds += 1

    def _worker_round(self) -> None:
        vm = self._folder / "vm"
        rclone(self._config, "sync", "there:down", vm / "down")
        self._start_what_is_new(vm / "down" / "queue.txt", vm / "up")
        rclone(self._config, "sync", vm / "up", "there:up")

    def _laptop_round(self) -> None:
        assert self._laptop_config is not None
        rclone(self._laptop_config, "sync", self._laptop / "down", "there:down")
        rclone(self._laptop_config, "sync", "there:up", self._laptop / "up")

    def _start_what_is_new(self, queue: Path, logs: Path) -> None:
        lines = queue.read_text("utf-8").splitlines() if queue.exists() else []
        for line in lines[self._taken :]:
            self._taken += 1
            stage = line.removeprefix("run:")
            with open(logs / f"{stage}.log", "ab") as log:
                process = subprocess.Popen(
                    list(self._stages[stage]),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, "SYNCD_RUN_ID": f"{stage}.{self._taken:04d}.loop"},
                )
            self._running.append(process)


@contextlib.contextmanager
def scripted(
    folder: Path, stages: Mapping[str, Sequence[str]], *, far: bool
) -> Iterator[tuple[ScriptLoop, Server, SlowLink]]:
    """Run the scripted loop in `folder`; yields it, its server, and the worker's link to that.

    With `far` the laptop is on the other side of the link as well.
    """
    served = folder / "served"
    make_dirs(served)
    with (
        serve_webdav(served, folder / "cache") as server,
        SlowLink(server.port, round_trip=ROUND_TRIP) as link,
    ):
        config = config_file(folder / "rclone.conf", server.section(link.port))
        loop = ScriptLoop(folder, served, config, stages, laptop_config=config if far else None)
        with loop.running():
            yield loop, server, link


# The old system


def old_waits(period: float, transfers: Sequence[float]) -> list[float]:
    """Return how long messages take that come at even moments of a period and are carried then.

    The wait for the next round is uniform between 0 and the period, so the moments are spread
    evenly over it: each of 100 with each of the measured transfers.
    """
    moments = [(k + 0.5) / 100 * period for k in range(100)]
    return [moment + transfer for moment in moments for transfer in transfers]


def transfer_seconds(
    server: Server, port: int, path: str, *, body: bytes | None, count: int
) -> list[float]:
    """Measure a file's way as the old daemons carried it: GET or, with a body, PUT, each over a
    connection of its own."""
    token = base64.b64encode(f"{server.user}:{server.password}".encode()).decode("ascii")
    found = []
    for _ in range(count):
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/{path}",
            data=body,
            headers={"Authorization": f"Basic {token}"},
            method="GET" if body is None else "PUT",
        )
        began = time.monotonic()
        with urllib.request.urlopen(request, timeout=60) as answer:
            answer.read()
        found.append(time.monotonic() - began)
    return found


def config_file(path: Path, section: str) -> Path:
    """Write an rclone configuration with the one remote `there`."""
    publish_bytes(path, f"[there]\n{section}".encode(), mode=0o600)
    return path
