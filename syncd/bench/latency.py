"""How long a queue line and a log line are on their way, beside both baselines."""

from __future__ import annotations

import itertools
import random
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol

from protocol.bench import Figure
from protocol.journal import parse_journal
from protocol.messages import QueuedCommand, decode_messages
from protocol.states import State
from protocol.wire import Kind, ObjectName, Role, Writer
from syncd.bench.baselines import (
    COMMAND_POLL_SECONDS,
    LOOP,
    OLD,
    STATUS_PUSH_SECONDS,
    old_waits,
    scripted,
    transfer_seconds,
)
from syncd.bench.place import WORLD, Place
from syncd.bench.programs import program
from syncd.bench.samples import p50, p95
from syncd.bench.server import until
from syncd.bench.world import Route, World
from syncd.config import load_key, sealer
from syncd.stages.attempt_files import STAGE, StageStart, read_file

OLD_SAMPLES = 20
_ROUTES = {
    Route.BRIDGE: "",
    Route.FAR: ", both ends 50 ms away",
    Route.OWN: ", on this remote",
}


class SetUp(Protocol):
    """Something that runs the lines of a queue and brings logs back."""

    @property
    def marks(self) -> Path:
        """Where stages leave word for us."""

    def append(self, line: str) -> None:
        """Append a line to the queue."""

    def log(self, stage: str) -> Path:
        """A stage's log, as the laptop has it."""

    def finish(self, number: int) -> None:
        """Wait until a command has ended."""


# From the queue to a stage


def append_to_start(place: Place, route: Route) -> list[Figure]:
    """A line is appended to queue.txt; the stage's program writes the time first of all."""
    with place.world(route, {"probe": probe(place.folder / WORLD / "marks")}) as built:
        parts: list[dict[str, float]] = []
        values = []
        for number in range(1, place.scale.samples + 1):
            began, value = one_append(built, number)
            values.append(value)
            parts.append(_parts(built, number, began))
            place.tell(number, place.scale.samples)
    baselines = {} if route is Route.OWN else _append_baselines(place, route)
    name = f"line appended to stage started{_ROUTES[route]}"
    figures = _p50_and_p95(name, values, ("<= 1.0", "<= 1.5"), baselines)
    return figures + _part_figures(name, parts)


def probe(marks: Path) -> list[str]:
    """Return the command line of a program that leaves the time at which it began in `marks`."""
    script = (
        "import os, sys, time; t = time.time_ns(); "
        "p = os.path.join(sys.argv[1], os.environ['SYNCD_RUN_ID']); "
        "f = open(p + '.new', 'w'); f.write(str(t)); f.close(); os.rename(p + '.new', p)"
    )
    # Without site packages: what is asked is when it begins, not how long Python takes.
    return [sys.executable, "-I", "-S", "-c", script, str(marks)]


def one_append(set_up: SetUp, number: int, *, pause: float = 1.0) -> tuple[int, float]:
    """Append a line, command `number`, at a random moment; return when, in ns, and the seconds
    until its stage began. Returns once it has ended."""
    time.sleep(random.uniform(0.0, pause))
    began = time.time_ns()
    set_up.append("run:probe")
    mark = until(lambda: next(_marks(set_up.marks, number), None), f"the start of run {number}")
    value = (int(mark.read_text()) - began) / 1e9
    set_up.finish(number)
    return began, value


def _marks(folder: Path, number: int) -> Iterator[Path]:
    return (path for path in folder.glob(f"probe.{number:04d}.*") if path.suffix != ".new")


def _parts(built: World, number: int, began: int) -> dict[str, float]:
    """Return how long each step of a command took, from what the ends have written anyway."""
    records, _ = parse_journal(built.worker.layout.journal.read_bytes())
    steps = {r.state: r for r in records if r.number == number}
    run_id = steps[State.STARTED].run_id
    spawned = read_file(built.worker.layout.runs / run_id / "attempt-1" / STAGE, StageStart)
    act = int(next(_marks(built.marks, number)).read_text()) / 1e9
    at: dict[str, float] = {}
    pack = _pack_of(built, number)
    if pack is not None and Role.CONTROLLER in built.links:
        at |= {"line seen, pack sent": pack.stat().st_ctime}
    elif pack is not None:
        made, there = pack.stat().st_mtime, pack.stat().st_ctime
        at |= {"line seen, pack made": made, "pack put on the remote": there}
    at |= {
        "pack read, command claimed": steps[State.CLAIMED].time,
        "attempt prepared": steps[State.STARTED].time,
        "supervisor spawned": spawned.time if spawned else act,
        "first act of the stage": act,
    }
    ends = list(at.values())
    return {
        name: end - before
        for name, end, before in zip(at, ends, [began / 1e9, *ends], strict=False)
    }


def _pack_of(built: World, number: int) -> Path | None:
    """Return the pack that said a command, where the remote lies on this machine's disk.

    Where rclone copies it there itself, its modification time is kept: when the pack was made.
    """
    opener = sealer(load_key(built.laptop.layout, {}))
    for folder in built.objects.iterdir() if built.objects else ():
        writer = Writer.parse(folder.name)
        if writer is None or writer.role is not Role.CONTROLLER:
            continue
        names = [name for path in folder.iterdir() if (name := ObjectName.parse(path.name))]
        for name in sorted((n for n in names if n.kind is Kind.PACK), reverse=True):
            path = folder / str(name)
            for message in decode_messages(opener.open(writer, name, path.read_bytes())):
                if isinstance(message, QueuedCommand) and message.number == number:
                    return path
    return None


def _part_figures(name: str, parts: Sequence[Mapping[str, float]]) -> list[Figure]:
    steps = parts[0] if parts else {}
    return [
        Figure(
            name=f"{name}: {step}, p50", value=p50([p[step] for p in parts if step in p]), unit="s"
        )
        for step in steps
    ]


def _append_baselines(place: Place, route: Route) -> dict[str, list[float]]:
    stages = {"probe": probe(place.folder / "loop" / "marks")}
    place.say(f"baseline: {LOOP}")
    with scripted(place.folder / "loop", stages, far=route is Route.FAR) as (loop, server, link):
        looped = [one_append(loop, n)[1] for n in range(1, place.scale.baseline_samples + 1)]
        carried = transfer_seconds(
            server, link.port, "down/queue.txt", body=None, count=OLD_SAMPLES
        )
    return {LOOP: looped, OLD: old_waits(COMMAND_POLL_SECONDS, carried)}


# From a log to the laptop


def log_to_laptop(place: Place, route: Route) -> list[Figure]:
    """A stage writes lines with the time; when each is in the laptop's log is seen."""
    stages = {"lines": program("lines", place.scale.samples)}
    with place.world(route, stages) as built:
        values = _follow(place, built, place.scale.samples)
    baselines: dict[str, list[float]] = {}
    if route is not Route.OWN:
        place.say(f"baseline: {LOOP}")
        count = place.scale.baseline_samples
        stages = {"lines": program("lines", count)}
        far = route is Route.FAR
        with scripted(place.folder / "loop", stages, far=far) as (loop, server, link):
            baselines[LOOP] = _follow(place, loop, count)
            body = loop.log("lines").read_bytes()
            carried = transfer_seconds(server, link.port, "lines.log", body=body, count=OLD_SAMPLES)
        baselines[OLD] = old_waits(STATUS_PUSH_SECONDS, carried)
    name = f"log line written to line on the laptop{_ROUTES[route]}"
    return _p50_and_p95(name, values, ("<= 0.5", "<= 0.8"), baselines)


def _follow(place: Place, set_up: SetUp, count: int) -> list[float]:
    """Run the stage `lines`; return how long each of its lines took."""
    set_up.append("run:lines")
    values: list[float] = []
    for now, line in itertools.islice(_arriving(set_up.log("lines")), 10 * count):
        stamp = line.split(b" ", 1)[0]
        if stamp.isdigit():  # not a line of the runner's
            values.append((now - int(stamp)) / 1e9)
            place.tell(len(values), count)
        if len(values) == count:
            break
    set_up.finish(1)
    return values


def _arriving(log: Path) -> Iterator[tuple[int, bytes]]:
    """Yield each line that comes into a log, with the time, in ns, at which it was seen."""
    at = 0
    while True:
        until(partial(_is_longer, log, at), "a log line")
        now = time.time_ns()
        with open(log, "rb") as file:
            file.seek(at)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        at += len(whole)
        for line in whole.splitlines():
            yield now, line


def _is_longer(path: Path, size: int) -> bool:
    return path.exists() and path.stat().st_size > size


def _p50_and_p95(
    name: str,
    values: Sequence[float],
    goals: tuple[str, str],
    baselines: Mapping[str, Sequence[float]],
) -> list[Figure]:
    found = []
    for told, percentile, goal in (("p50", p50, goals[0]), ("p95", p95, goals[1])):
        figure = Figure(
            name=f"{name}, {told} of {len(values)}", value=percentile(values), unit="s", goal=goal
        )
        found += figure.beside({n: percentile(each) for n, each in baselines.items()})
    return found
