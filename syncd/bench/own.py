"""The rows that make sense on a remote of the user's own.

Its calls are counted by the daemons' rclone, which tells them in Prometheus' text form when it is
asked to (`--metrics-addr`); only backends that speak HTTP are counted.
"""

from __future__ import annotations

import contextlib
import re
import secrets
import time
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path

from protocol.bench import Figure
from protocol.wire import ObjectName, Role, Writer
from syncd.bench.bulk import BURST, burst_seconds, random_sources
from syncd.bench.idle import first_appends, first_figures, probe_stages, settle
from syncd.bench.latency import one_append
from syncd.bench.meter import ObjectMeter
from syncd.bench.place import Place
from syncd.bench.programs import program
from syncd.bench.samples import p50, size_text
from syncd.bench.server import free_port
from syncd.bench.world import Route, World
from syncd.rclone.rcd import Rclone
from syncd.rclone.remote import RcloneRemote

KIB = 1024
METER_SECONDS = 5.0
_CALLS = re.compile(r"^rclone_http_status_code\{.*\} (?P<count>\S+)$", re.MULTILINE)


@contextlib.contextmanager
def scratch(remote: str, folder: Path, *, config: Path | None) -> Iterator[str]:
    """Yield a new folder on a remote; it is removed when the block ends, however it does."""
    name = f"syncd-bench-{secrets.token_hex(4)}"
    with Rclone(folder, config=config) as rclone:
        parent = RcloneRemote(rclone, remote)
        try:
            yield below(remote, name)
        finally:
            parent.delete_folder(name)


def below(remote: str, name: str) -> str:
    """Return what rclone calls a folder of a remote."""
    return f"{remote}{name}" if remote.endswith((":", "/")) else f"{remote}/{name}"


def text_log(place: Place, rate: int) -> list[Figure]:
    """What the bytes of a log cost in bodies of objects."""
    seconds = place.scale.slow_log_seconds
    stages = {"text": program("text", seconds, rate)}
    with (
        Rclone(place.folder / "look", config=place.config) as rclone,
        place.world(Route.OWN, stages) as built,
    ):
        place.say(f"{size_text(rate)}/s for {seconds:.0f} s")
        remote = RcloneRemote(rclone, place.own)
        with ObjectMeter(lambda: _objects(remote), every=METER_SECONDS) as meter:
            before = meter.body_bytes()
            built.append("run:text")
            built.await_ready("text")
            bodies = meter.body_bytes() - before
        raw = built.worker.layout.log("text").stat().st_size
    name = f"text log at {size_text(rate)}/s for {seconds:.0f} s, on this remote"
    return [
        Figure(
            name=f"bytes of object bodies per new log byte, {name}",
            value=bodies / raw,
            unit="ratio",
            goal="<= 0.3" if rate >= 64 * KIB else "",
        )
    ]


def _objects(remote: RcloneRemote) -> Iterator[tuple[str, int]]:
    for folder in remote.list(""):
        if Writer.parse(folder.name) is None:
            continue
        for entry in remote.list(folder.name):
            name = ObjectName.parse(entry.name)
            if name is not None:
                yield f"{folder.name}/{entry.name}", name.length


def idle(place: Place) -> list[Figure]:
    """Each end's calls a minute while nothing runs, and what the first line after that waits."""
    ports = {role: free_port() for role in Role}
    environ = {
        role: {
            "SYNCD_IDLE_AFTER": f"{place.scale.idle_after}",
            "RCLONE_METRICS_ADDR": f"127.0.0.1:{port}",
        }
        for role, port in ports.items()
    }
    with place.world(Route.OWN, probe_stages(place), environ) as built:
        one_append(built, 1)
        settle(place)
        calls = _calls_a_minute(place, built, ports)
        first = first_appends(place, built)
    return [
        Figure(
            name=f"remote calls a minute when nothing runs: {role}, on this remote",
            value=value,
            unit="1/min",
        )
        for role, value in calls.items()
    ] + first_figures("on this remote", first)


def _calls_a_minute(place: Place, built: World, ports: Mapping[Role, int]) -> dict[Role, float]:
    before = {role: http_calls(_metrics(port)) for role, port in ports.items()}
    if not any(before.values()):
        place.say("this remote does not speak HTTP: its calls cannot be counted")
        return {}
    began = time.monotonic()
    time.sleep(place.scale.idle_seconds)
    minutes = (time.monotonic() - began) / 60
    return {r: (http_calls(_metrics(p)) - before[r]) / minutes for r, p in ports.items()}


def _metrics(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        return str(answer.read().decode("utf-8"))


def http_calls(metrics: str) -> int:
    """Return how many HTTP calls rclone has made, by its metrics."""
    return sum(int(float(match["count"])) for match in _CALLS.finditer(metrics))


def burst(place: Place) -> list[Figure]:
    """Uploads of small objects side by side."""
    sources = random_sources(place.folder / "small")
    with Rclone(place.folder / "rcd", config=place.config) as rclone:
        remote = RcloneRemote(rclone, place.own)
        remote.make_root()
        values = [burst_seconds(remote, sources, f"burst{n}") for n in range(place.scale.bursts)]
    name = f"{BURST} objects of 1 KiB uploaded side by side, on this remote"
    return [Figure(name=f"{name}, p50 of {len(values)}", value=p50(values), unit="s")]
