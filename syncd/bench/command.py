"""`syncd bench`: runs a benchmark, prints its table, and keeps its JSON."""

from __future__ import annotations

import contextlib
import json as jsonlib
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from protocol.bench import Figure, Report, machine
from protocol.errors import RunFailedError, UsageError
from protocol.publish import publish_bytes
from syncd.bench import own
from syncd.bench.link import OWN_ROWS, ROWS, Outcome, chosen, run
from syncd.bench.place import Place
from syncd.bench.report import print_table
from syncd.bench.samples import FULL, QUICK
from syncd.cli import Flag, Json
from syncd.rclone.admin import Admin
from syncd.rclone.errors import shown
from syncd.show import plain_console
from syncd.watching import ended_by_sigterm

app = App(
    name="bench",
    help="Measure what syncd does, beside what else could be used.",
    help_epilogue="",
)


@app.command(
    help_epilogue=(
        "Examples:\n\n"
        "    syncd bench link --quick\n"
        "    syncd bench link --only append log\n"
        "    syncd bench link --remote drive:\n"
    )
)
def link(
    *,
    quick: Flag = False,
    only: Annotated[list[str] | None, Parameter(negative=(), consume_multiple=True)] = None,
    remote: str = "",
    rclone_config: str = "",
    output: Annotated[Path | None, Parameter(name=["--output", "-o"])] = None,
    json: Json = False,
) -> None:
    """Measure the way between both ends: a webdav server 50 ms away, or a remote of yours.

    Starts `syncd watch` for a laptop and for a worker in a temporary folder, and
    measures them beside `rclone sync` in a loop and beside polls every 30 and
    60 s. Takes about half an hour; --quick, a third of that. The exit code is 8
    when a row could not be measured; a goal that is missed changes nothing.

    Parameters
    ----------
    quick
        Less of everything: shorter logs, smaller files, fewer samples.
    only
        The rows to run, all by default: append, log,
        append-far, log-far, text, text-slow, bar, large-log,
        idle, idle-drive, up, down, burst, files. With
        --remote: append, log, text, text-slow, idle, burst.
    remote
        Measure on this remote, in a folder of its own that is removed afterwards.
    rclone_config
        Another configuration file than rclone's own, for --remote.
    output
        Where the JSON is kept; bench-link-<date>.json in this folder by default.
    json
        Print the JSON as well, in place of the table.
    """
    rows = chosen(only or (), OWN_ROWS if remote else ROWS)
    kept = (output or Path(time.strftime("bench-link-%Y-%m-%d-%H%M%S.json"))).resolve()
    console = plain_console(stderr=True)
    say = partial(console.print, soft_wrap=True)
    here = machine() | {
        "rclone": Admin().version(),
        "form": "quick" if quick else "full",
        "remote": shown(remote) or "rclone serve webdav, 50 ms round trip",
    }
    found: list[Outcome] = []
    with ended_by_sigterm(), tempfile.TemporaryDirectory(prefix="syncd-bench-") as name:
        scale = QUICK if quick else FULL
        place = Place(folder=Path(name), scale=scale, say=say, rclone_config=rclone_config)
        with _on(remote, place) as prepared:
            for outcome in run(rows, prepared):
                found.append(outcome)
                _keep(kept, _report(here, found))
    report = _report(here, found)
    if json:
        print(jsonlib.dumps(report.to_json(), indent=1, ensure_ascii=False))
    else:
        print_table(plain_console(), report)
    say(f"kept in {kept}")
    _check_all_measured(found)


def _check_all_measured(found: Sequence[Outcome]) -> None:
    why = "; ".join(f"{each.row}: {each.failure}" for each in found if each.failure)
    if why:
        raise RunFailedError("syncd bench link", why=f"not measured: {why}")


@contextlib.contextmanager
def _on(remote: str, place: Place) -> Iterator[Place]:
    """Prepare a remote of the user's, having said what is done there."""
    if not remote:
        yield place
        return
    place.say(
        f"On {shown(remote)} this makes a folder syncd-bench-..., in which two daemons work for "
        "some minutes and leave some hundreds of small objects, and removes it afterwards."
    )
    with own.scratch(remote, place.folder / "rclone", config=place.config) as folder:
        place.say(f"working in {shown(folder)}")
        yield replace(place, own=folder)
    place.say(f"removed {shown(folder)}")


def _report(here: dict[str, str], found: Sequence[Outcome]) -> Report:
    figures: list[Figure] = [figure for outcome in found for figure in outcome.figures]
    return Report(bench="link", machine=here, figures=tuple(figures))


def _keep(path: Path, report: Report) -> None:
    """Keep what there is so far: an interrupt loses no row that was measured."""
    text = jsonlib.dumps(report.to_json(), indent=1, ensure_ascii=False)
    publish_bytes(path, f"{text}\n".encode())


@app.command(
    help_epilogue=(
        "Examples:\n\n"
        "    syncd bench checkpoints runs/store/checkpoints\n"
        "    syncd bench checkpoints runs -- trainer pretrain --output runs\n"
    )
)
def checkpoints(
    folder: Path,
    /,
    *command: Annotated[str, Parameter(allow_leading_hyphen=True)],
    pattern: str = "*.pt",
    json: Json = False,
) -> None:
    """Measure what uploads would save if only pieces of checkpoints were sent that are new.

    Of the files that are in a folder, or of all that a training writes there while
    it runs. It takes about half a minute for 100 MB.

    Parameters
    ----------
    folder
        The folder of the checkpoints.
    command
        The training to run, after "--".
    pattern
        Which files are checkpoints.
    json
        Print JSON in place of the table.
    """
    from syncd.bench.savings import figures, read, written

    what = "syncd bench checkpoints"
    if not command and not folder.is_dir():
        hint = 'Name the one that has them, or a command that makes some, after "--".'
        raise UsageError(what, path=folder, why="there is no such folder", hint=hint)
    files = written(folder, command, pattern) if command else read(folder, pattern)
    if len(files) < 2:
        why = f"{len(files)} files match {pattern}, and two are needed to compare"
        raise UsageError(what, path=folder, why=why, hint="--pattern says which files they are.")
    report = Report(bench="checkpoints", machine=machine(), figures=tuple(figures(files)))
    if json:
        print(jsonlib.dumps(report.to_json(), indent=1))
    else:
        print_table(plain_console(), report)
