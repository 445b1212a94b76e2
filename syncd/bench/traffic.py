"""What a log costs to carry: bytes of object bodies, and all bytes on the wire.

*Object bodies* are those of every object that either end put on the remote meanwhile: packs,
states and chunks, acknowledgements included. *On the wire* is all that passed the worker's
connection, both ways: the same, HTTP's own lines, and every look at the remote. TCP's and IP's
headers are not counted.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from protocol.bench import Figure
from syncd.bench.baselines import LOOP, OLD, STATUS_PUSH_SECONDS, config_file, rclone, scripted
from syncd.bench.meter import ObjectMeter, objects_in
from syncd.bench.place import WORLD, Place
from syncd.bench.programs import APPENDED, READY, incompressible, program
from syncd.bench.samples import size_text
from syncd.bench.server import PATIENCE, ROUND_TRIP, serve_webdav, until
from syncd.bench.slow_link import SlowLink
from syncd.bench.world import Route, World, tail_of

KIB = 1024
LOOP_SECONDS = 30.0
QUIET_SECONDS = 3.0


@dataclass
class Cost:
    """Bytes that passed while a block ran."""

    bodies: int = 0
    wire: int = 0


@contextlib.contextmanager
def counted(built: World) -> Iterator[Cost]:
    """Count what passes while the block runs; the figures are there after it."""
    assert built.objects is not None
    cost = Cost()
    with ObjectMeter(partial(objects_in, built.objects)) as meter:
        bodies, wire = meter.body_bytes(), built.wire_bytes()
        yield cost
        cost.bodies = meter.body_bytes() - bodies
        cost.wire = built.wire_bytes() - wire


def text_log(place: Place, rate: int, *, goals: tuple[str, str] = ("", "")) -> list[Figure]:
    """A training log grows evenly: what its bytes cost."""
    full = rate >= 16 * KIB
    seconds = place.scale.log_seconds if full else place.scale.slow_log_seconds
    stages = {"text": program("text", seconds, rate)}
    with place.world(Route.BRIDGE, stages) as built:
        place.say(f"{size_text(rate)}/s for {seconds:.0f} s")
        with counted(built) as cost:
            built.append("run:text")
            built.await_ready("text")
        raw = built.worker.layout.log("text").stat().st_size
    bodies, wire = _loop_cost(place, rate)
    name = f"per new log byte, text log at {size_text(rate)}/s for {seconds:.0f} s"
    found = Figure(
        name=f"bytes of object bodies {name}", value=cost.bodies / raw, unit="ratio", goal=goals[0]
    ).beside({LOOP: bodies})
    old = _old_cost(rate, seconds)
    return found + Figure(
        name=f"all bytes on the wire {name}", value=cost.wire / raw, unit="ratio", goal=goals[1]
    ).beside({LOOP: wire, OLD: old})


def _old_cost(rate: float, seconds: float) -> float:
    """Bytes per log byte of a system that pushes the whole log every 60 s."""
    pushes = [k * STATUS_PUSH_SECONDS for k in range(1, int(seconds // STATUS_PUSH_SECONDS) + 1)]
    return sum(rate * at for at in pushes or [seconds]) / (rate * seconds)


def _loop_cost(place: Place, rate: int) -> tuple[float, float]:
    """Return file bytes and wire bytes per log byte, where a loop sends the file each time.

    They grow with the log: these are those of its first half minute. What it sends of the file is
    all that goes up but for HTTP's lines, which are small beside it.
    """
    seconds = min(place.scale.log_seconds, LOOP_SECONDS)
    stages = {"text": program("text", seconds, rate)}
    place.say(f"baseline: {LOOP}, {seconds:.0f} s")
    with scripted(place.folder / "loop", stages, far=False) as (loop, _, link):
        before = link.up, link.up + link.down
        loop.append("run:text")
        log = loop.log("text")
        until(lambda: READY.encode() in tail_of(log), "the end of the log", seconds=10 * PATIENCE)
        raw = log.stat().st_size
        return (link.up - before[0]) / raw, (link.up + link.down - before[1]) / raw


def bar_log(place: Place) -> list[Figure]:
    """Progress bars as tqdm draws them: what they cost against what was written.

    A run that says nothing costs its start, heartbeats and acknowledgements as well; so the bars'
    own cost is what they add to it.
    """
    seconds = place.scale.bar_seconds
    costs: dict[str, Cost] = {}
    for stage, told in (("silent", "a silent run"), ("bar", "progress bars")):
        with place.world(Route.BRIDGE, {stage: program(stage, seconds)}) as built:
            place.say(f"{told} for {seconds:.0f} s")
            with counted(built) as cost:
                built.append(f"run:{stage}")
                built.await_ready(stage)
            costs[stage] = cost
            raw = built.worker.layout.log(stage).stat().st_size
            shown = built.log(stage).stat().st_size
    name = f"a tqdm log of {seconds:.0f} s"
    own = costs["bar"].bodies - costs["silent"].bodies
    return [
        Figure(name=f"object bodies that {name} adds to a silent run, against its raw size",
               value=own / raw, unit="ratio", goal="<= 0.05"),
        Figure(name=f"the same with all that a silent run costs, {name}",
               value=costs["bar"].bodies / raw, unit="ratio"),
        Figure(name=f"size at the laptop of {name} against its raw size",
               value=shown / raw, unit="ratio"),
        Figure(name=f"all bytes on the wire of {name} against its raw size",
               value=costs["bar"].wire / raw, unit="ratio"),
    ]  # fmt: skip


def append_to_large(place: Place) -> list[Figure]:
    """4 KiB that cannot be compressed are appended to a large log that has arrived."""
    size = place.scale.large_log
    go = place.folder / WORLD / "marks" / "go"
    with place.world(Route.BRIDGE, {"large": program("large", size, go)}) as built:
        place.say(f"a log of {size_text(size)}")
        built.append("run:large")
        built.await_ready("large")
        time.sleep(QUIET_SECONDS)  # until what came before is acknowledged
        here, there = built.log("large"), built.worker.layout.log("large")
        before = there.stat().st_size
        with counted(built) as cost:
            go.touch()
            built.until(lambda: there.stat().st_size >= before + APPENDED, "the append")
            built.until(
                lambda: tail_of(here, APPENDED) == tail_of(there, APPENDED), "the last 4 KiB"
            )
            time.sleep(QUIET_SECONDS)  # what is acknowledged, and said of it, belongs to it
    whole = _copied_whole(place, size)
    name = f"4 KiB appended to a log of {size_text(size)}"
    copied = {"rclone copy, all bytes up": float(whole)}
    return [
        *Figure(
            name=f"{name}: bytes of object bodies", value=cost.bodies, unit="bytes", goal="<= 8192"
        ).beside(copied),
        Figure(name=f"{name}: all bytes on the wire meanwhile", value=cost.wire, unit="bytes"),
    ]


def _copied_whole(place: Place, size: int) -> int:
    """Return what `rclone copy` sends of a file that has grown by 4 KiB."""
    place.say("baseline: rclone copy")
    folder = place.folder / "copy"
    served, source = folder / "served", folder / "large.log"
    served.mkdir(parents=True)
    write_text(source, size)
    with (
        serve_webdav(served, folder / "cache") as server,
        SlowLink(server.port, round_trip=ROUND_TRIP) as link,
    ):
        config = config_file(folder / "rclone.conf", server.section(link.port))
        rclone(config, "copy", source, "there:", check=True)
        with open(source, "ab") as file:
            file.write(incompressible(APPENDED))
        before = link.up
        rclone(config, "copy", source, "there:", check=True)
        return link.up - before


def write_text(path: Path, size: int) -> None:
    """Write a file of text, quickly."""
    block = b"a line of a log, as long as it may be\n" * 30_000
    with open(path, "wb") as file:
        while (left := size - file.tell()) > 0:
            file.write(block[:left])
