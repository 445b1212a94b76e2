"""The benchmark of the link: its rows, and how they are run one after another."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from protocol.bench import Figure
from protocol.errors import UsageError, UserError
from protocol.publish import make_dirs
from syncd.bench import bulk, idle, latency, own, traffic
from syncd.bench.place import Place
from syncd.bench.world import Route

Row = Callable[[Place], list[Figure]]

ROWS: Mapping[str, Row] = {
    "append": partial(latency.append_to_start, route=Route.BRIDGE),
    "log": partial(latency.log_to_laptop, route=Route.BRIDGE),
    "append-far": partial(latency.append_to_start, route=Route.FAR),
    "log-far": partial(latency.log_to_laptop, route=Route.FAR),
    "text": partial(traffic.text_log, rate=64 * traffic.KIB, goals=("<= 0.3", "<= 0.4")),
    "text-slow": partial(traffic.text_log, rate=traffic.KIB),
    "bar": traffic.bar_log,
    "large-log": traffic.append_to_large,
    "idle": idle.on_the_bridge,
    "idle-drive": idle.on_drive,
    "up": bulk.large_up,
    "down": bulk.large_down,
    "burst": bulk.burst,
    "files": bulk.many_files,
}
OWN_ROWS: Mapping[str, Row] = {
    "append": partial(latency.append_to_start, route=Route.OWN),
    "log": partial(latency.log_to_laptop, route=Route.OWN),
    "text": partial(own.text_log, rate=64 * own.KIB),
    "text-slow": partial(own.text_log, rate=own.KIB),
    "idle": own.idle,
    "burst": own.burst,
}


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came of a row: its figures, or why there are none."""

    row: str
    figures: Sequence[Figure] = ()
    failure: str = ""


def chosen(names: Sequence[str], rows: Mapping[str, Row]) -> dict[str, Row]:
    """Return the rows of these names, all when there are none. Raises UsageError."""
    unknown = [name for name in names if name not in rows]
    if unknown:
        raise UsageError(
            "syncd bench link",
            why=f"there is no row {unknown[0]!r} here",
            hint=f"There are: {', '.join(rows)}.",
        )
    return {name: row for name, row in rows.items() if not names or name in names}


def run(rows: Mapping[str, Row], place: Place) -> Iterator[Outcome]:
    """Run rows, each in a folder of its own; a row that fails keeps none of the others away."""
    for at, (name, row) in enumerate(rows.items(), start=1):
        place.say(f"{name} ({at} of {len(rows)})")
        folder = place.folder / name
        make_dirs(folder)
        remote = own.below(place.own, name) if place.own else ""
        say = partial(_indented, place.say)
        try:
            figures = row(replace(place, folder=folder, own=remote, say=say))
        except (UserError, OSError, subprocess.SubprocessError) as error:
            place.say(f"  could not be measured: {error}")
            yield Outcome(row=name, failure=str(error))
        else:
            yield Outcome(row=name, figures=figures)


def _indented(say: Callable[[str], None], text: str) -> None:
    say(f"  {text}")
