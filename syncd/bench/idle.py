"""What two ends cost while nothing happens, and what the first line after that waits.

Both daemons take a quiet time of seconds for the ten minutes that they wait otherwise
(`$SYNCD_IDLE_AFTER`); what they do then is what they do after ten minutes.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import psutil

from protocol.bench import Figure
from protocol.wire import Role
from syncd.bench.baselines import LOOP, OLD, OLD_CALLS_A_MINUTE, scripted
from syncd.bench.latency import one_append, probe
from syncd.bench.place import WORLD, Place
from syncd.bench.samples import p50
from syncd.bench.world import Route, World, cpu_seconds

LOOP_SECONDS = 15.0
# From the last news until both ends are as quiet as they get: acknowledgements, a last status.
SETTLE_SECONDS = 40.0


@dataclass(frozen=True, kw_only=True)
class Quiet:
    """What was counted while nothing happened: remote calls a minute, processor time in percent."""

    calls: dict[Role, float]
    cpu: dict[str, float]


def on_the_bridge(place: Place) -> list[Figure]:
    """Calls, processor time and the first append of an idle worker on the bridge."""
    with place.world(Route.BRIDGE, probe_stages(place), _environ(place, "")) as built:
        one_append(built, 1)
        quiet = _measure(place, built)
        first = first_appends(place, built)
    calls = _calls("worker, on the bridge", quiet.calls[Role.WORKER], "<= 30")
    return [
        *calls.beside({LOOP: _loop_calls(place), OLD: OLD_CALLS_A_MINUTE}),
        *first_figures("on the bridge", first),
        *(
            Figure(
                name=f"processor time of the idle {who}, percent of a core",
                value=value,
                unit="%",
                goal="" if "server" in who else "<= 0.5",
            )
            for who, value in quiet.cpu.items()
        ),
    ]


def on_drive(place: Place) -> list[Figure]:
    """The same by the settings that a Drive gets, over webdav for both ends."""
    environ = _environ(place, "drive")
    with place.world(Route.FAR, probe_stages(place), environ) as built:
        one_append(built, 1)
        quiet = _measure(place, built)
        first = first_appends(place, built)
    return [
        _calls(f"{role}, by Drive's profile", calls, "<= 6") for role, calls in quiet.calls.items()
    ] + first_figures("by Drive's profile", first)


def probe_stages(place: Place) -> dict[str, list[str]]:
    """Return the one stage that `one_append` runs."""
    return {"probe": probe(place.folder / WORLD / "marks")}


def _environ(place: Place, profile: str) -> dict[Role, dict[str, str]]:
    environ = {"SYNCD_IDLE_AFTER": f"{place.scale.idle_after}"}
    return dict.fromkeys(Role, environ | ({"SYNCD_PROFILE": profile} if profile else {}))


def _calls(who: str, value: float, goal: str) -> Figure:
    return Figure(
        name=f"remote calls a minute when nothing runs: {who}",
        value=value,
        unit="1/min",
        goal=goal,
    )


def settle(place: Place) -> None:
    """Wait until both ends are as quiet as they get."""
    time.sleep(place.scale.idle_after + SETTLE_SECONDS)


def _measure(place: Place, built: World) -> Quiet:
    seconds = place.scale.idle_seconds
    settle(place)
    place.say(f"counting for {seconds:.0f} s")
    calls = {role: built.requests(role) for role in built.links}
    used = _used(built)
    began = time.monotonic()
    time.sleep(seconds)
    took = time.monotonic() - began
    return Quiet(
        calls={role: (built.requests(role) - n) * 60 / took for role, n in calls.items()},
        cpu={who: (now - used[who]) * 100 / took for who, now in _used(built).items()},
    )


def _used(built: World) -> dict[str, float]:
    found = {
        "controller and its rclone": built.laptop.cpu_seconds(),
        "worker and its rclone": built.worker.cpu_seconds(),
    }
    if built.server:
        found["bridge's server"] = cpu_seconds(psutil.Process(built.server.process.pid))
    return found


def first_appends(place: Place, built: World) -> list[float]:
    """Append a line after each of some quiet times, at moments of any phase; return the seconds
    until each stage began."""
    values = []
    for number in range(2, 2 + place.scale.first_appends):
        place.say(f"first append after a quiet time, {number - 1} of {place.scale.first_appends}")
        settle(place)
        values.append(one_append(built, number, pause=6.0)[1])
    return values


def first_figures(where: str, values: list[float]) -> list[Figure]:
    """Return the figures of `first_appends`."""
    name = f"first append after a quiet time, {where}"
    return [
        Figure(name=f"{name}, p50 of {len(values)}", value=p50(values), unit="s"),
        Figure(name=f"{name}, longest of {len(values)}", value=max(values), unit="s"),
    ]


def _loop_calls(place: Place) -> float:
    place.say(f"baseline: {LOOP}")
    with scripted(place.folder / "loop", {}, far=False) as (_, _, link):
        before, began = link.requests, time.monotonic()
        time.sleep(LOOP_SECONDS)
        return (link.requests - before) * 60 / (time.monotonic() - began)
