"""A laptop's end and a VM's, each a real `syncd watch`, and what is between them.

BRIDGE   the laptop serves its disk by webdav, and is woken by it; the worker is 50 ms away
FAR      both ends reach the remote by webdav, each 50 ms away
NEAR     as BRIDGE, on the loopback without delay
OWN      both ends reach a remote of the user's
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TypeVar

import psutil

from protocol.paths import Layout
from protocol.publish import make_dirs, publish_bytes
from protocol.states import State
from protocol.wire import Role
from syncd.bench.programs import READY
from syncd.bench.server import PATIENCE, ROUND_TRIP, Server, clean_environment, serve_webdav, until
from syncd.bench.slow_link import SlowLink
from syncd.setup import initialise
from syncd.view import read_journal
from syncd.watching import Watch

T = TypeVar("T")


class Route(StrEnum):
    """How the two ends reach each other."""

    BRIDGE = "bridge"
    FAR = "far"
    NEAR = "near"
    OWN = "own"


class End(Watch):
    """One end: its folder, and its daemon while one runs."""

    def __init__(self, layout: Layout, environ: Mapping[str, str]) -> None:
        output = layout.root.with_suffix(".log")
        super().__init__(layout, output, environ={**clean_environment(), **environ})

    def cpu_seconds(self) -> float:
        """Processor time that the daemon and its rclone have used so far."""
        daemon = psutil.Process(self.pid)
        return sum(cpu_seconds(each) for each in (daemon, *daemon.children(recursive=True)))

    def stop(self) -> None:
        """End the daemon, and the stages that would go on without it."""
        super().stop()
        supervisors = [p for p in psutil.process_iter(["cmdline"]) if self._supervises(p)]
        for process in supervisors:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.terminate()
        psutil.wait_procs(supervisors, timeout=15)

    def _supervises(self, process: psutil.Process) -> bool:
        command = process.info["cmdline"] or ()
        runs = str(self.layout.runs)
        return "syncd.stages.supervisor" in command and any(
            word.startswith(runs) for word in command
        )


def cpu_seconds(process: psutil.Process) -> float:
    """Processor time that a process has used so far; 0 for one that is gone."""
    try:
        times = process.cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return float(times.user + times.system)


@dataclass(frozen=True, kw_only=True)
class World:
    """Both ends at work. `objects` is the remote's folder where it lies on this machine."""

    folder: Path
    laptop: End
    worker: End
    objects: Path | None
    server: Server | None
    links: Mapping[Role, SlowLink]

    @property
    def marks(self) -> Path:
        """Where stages leave word for us."""
        return self.folder / "marks"

    def until(self, found: Callable[[], T | None], what: str, *, seconds: float = PATIENCE) -> T:
        """As `server.until`, and fails at once when a daemon has ended."""

        def look() -> T | None:
            self.laptop.check()
            self.worker.check()
            return found()

        return until(look, what, seconds=seconds)

    def wire_bytes(self) -> int:
        """All that has passed the slow links so far, both ways."""
        return sum(link.up + link.down for link in self.links.values())

    def requests(self, role: Role) -> int:
        """How many requests an end has made over its slow link so far."""
        return self.links[role].requests

    def append(self, line: str) -> None:
        """Append a line to the queue, as `echo` would."""
        with open(self.laptop.layout.queue, "a", encoding="utf-8") as queue:
            queue.write(f"{line}\n")

    def log(self, stage: str) -> Path:
        """A stage's log, as the laptop has it."""
        return self.laptop.layout.log(stage)

    def finish(self, number: int) -> None:
        """Wait until a command has ended, as the laptop has it."""

        def ended() -> bool:
            record = read_journal(self.laptop.layout).get(number)
            return record is not None and record.state is State.ENDED

        self.until(ended, f"the end of command {number}")

    def await_ready(self, stage: str) -> None:
        """Wait until the laptop has what a program writes last before it waits, or ends."""
        self.until(
            lambda: READY.encode() in tail_of(self.log(stage)),
            f"the end of {stage}.log",
            seconds=10 * PATIENCE,
        )


def tail_of(path: Path, size: int = 8192) -> bytes:
    """Return the last bytes of a file; empty when there is none."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - size))
            return file.read()
    except FileNotFoundError:
        return b""


def stages_text(stages: Mapping[str, Sequence[str]]) -> str:
    """Return a stages.toml of programs, name → command line."""
    return "".join(
        f"[stages.{name}]\ncommand = {json.dumps(list(command))}\ngpu = 0\n\n"
        for name, command in stages.items()
    )


# Building one


@contextlib.contextmanager
def world(
    folder: Path,
    route: Route,
    stages: Mapping[str, Sequence[str]],
    *,
    environ: Mapping[Role, Mapping[str, str]] | None = None,
    own: str = "",
    rclone_config: str = "",
) -> Iterator[World]:
    """Build a world in `folder`, which is removed afterwards, and start both ends.

    `environ` is added to the daemons' environment; `own` is the remote of
    Route.OWN, found in `rclone_config`.
    """
    make_dirs(folder / "marks")
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        built = _build(folder, route, environ or {}, own, rclone_config, stack)
        publish_bytes(
            built.laptop.layout.serve / "stages.toml", stages_text(stages).encode("utf-8")
        )
        for end in (built.laptop, built.worker):
            stack.callback(end.stop)
            end.start()
        _greet(built)
        yield built


def _build(
    folder: Path,
    route: Route,
    environ: Mapping[Role, Mapping[str, str]],
    own: str,
    rclone_config: str,
    stack: contextlib.ExitStack,
) -> World:
    laptop = End(Layout(folder / "laptop"), environ.get(Role.CONTROLLER, {}))
    worker = End(Layout(folder / "vm"), environ.get(Role.WORKER, {}))
    if route is Route.OWN:
        _initialise(laptop, worker, dict.fromkeys(Role, own), rclone_config)
        return World(
            folder=folder, laptop=laptop, worker=worker, objects=None, server=None, links={}
        )
    objects = folder / "objects"
    make_dirs(objects)
    server = stack.enter_context(serve_webdav(objects, folder / "cache"))
    far = {Route.BRIDGE: [Role.WORKER], Route.FAR: list(Role)}.get(route, [])
    links = {
        role: stack.enter_context(SlowLink(server.port, round_trip=ROUND_TRIP)) for role in far
    }
    ports = {role: links[role].port if role in links else server.port for role in Role}
    remotes = {role: server.url(port) for role, port in ports.items()}
    if route is not Route.FAR:
        remotes[Role.CONTROLLER] = str(objects)
    _initialise(laptop, worker, remotes)
    return World(
        folder=folder, laptop=laptop, worker=worker, objects=objects, server=server, links=links
    )


def _initialise(
    laptop: End, worker: End, remotes: Mapping[Role, str], rclone_config: str = ""
) -> None:
    for end, role in ((laptop, Role.CONTROLLER), (worker, Role.WORKER)):
        initialise(
            end.layout,
            role=role,
            remote=remotes[role],
            key_file=laptop.layout.key if role is Role.WORKER else None,
            rclone_config=rclone_config,
        )


def _greet(built: World) -> None:
    """Wait until each end knows the other, and the payload has arrived."""
    built.until(built.laptop.layout.status.exists, "the worker's first status")
    built.until((built.worker.layout.serve / "stages.toml").exists, "the payload")
