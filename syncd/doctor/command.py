"""The command `syncd doctor`: looks, prints, and says by its exit code what to mend first."""

from __future__ import annotations

import json as jsonlib
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import Annotated, TypeVar

from cyclopts import Parameter
from rich.text import Text

from protocol.errors import (
    BusyError,
    ConfigError,
    DataError,
    ExitCode,
    RefusedError,
    RemoteError,
    RunFailedError,
    UsageError,
    UserError,
)
from protocol.logs import one_line
from protocol.paths import Layout
from syncd.cli import Flag, Folder, Json
from syncd.doctor.checks import Check, run_checks
from syncd.doctor.drill import Outcome, Verdict, do_drills
from syncd.doctor.findings import Finding, Level, exit_code
from syncd.doctor.folder import (
    check_daemon,
    check_disk,
    check_filesystem,
    check_folder,
    check_rights,
    check_stages,
)
from syncd.doctor.machine import (
    check_gpu,
    check_memory,
    check_onnx,
    check_python,
    check_rclone,
)
from syncd.doctor.own_pair import own_pair
from syncd.doctor.patient import look_at
from syncd.doctor.remote import check_remote
from syncd.show import plain_console
from syncd.view import find_folder

Told = TypeVar("Told", Finding, Outcome)

CHECKS = (
    Check("python", check_python),
    Check("rclone", check_rclone),
    Check("folder", check_folder),
    Check("rights", check_rights),
    Check("disk", check_disk),
    Check("file system", check_filesystem),
    Check("memory", check_memory),
    Check("gpu", check_gpu, seconds=150.0),
    Check("onnx", check_onnx),
    Check("stages", check_stages),
    Check("daemon", check_daemon),
    Check("remote", check_remote, seconds=120.0),
)
_STYLES: dict[StrEnum, str] = {
    Level.OK: "green",
    Level.WARNING: "yellow",
    Level.WRONG: "bold red",
    Verdict.PASSED: "green",
    Verdict.SKIPPED: "yellow",
    Verdict.FAILED: "bold red",
}
_ERRORS: dict[ExitCode, type[UserError]] = {
    error.exit_code: error
    for error in (UserError, ConfigError, DataError, RemoteError, RefusedError, BusyError)
}


def doctor(
    *,
    folder: Folder = None,
    json: Json = False,
    drill: Flag = False,
    local: Flag = False,
    yes: Annotated[bool, Parameter(name=["--yes", "-y"], negative=())] = False,
) -> None:
    """The command; what it does is said where it is registered, in `syncd.cli`.

    Parameters
    ----------
    folder
        The shared folder's end here.
    json
        Print the findings, or how the drills went, as a list of objects.
    drill
        Kill and stall the daemon that it starts here, and rclone, while harmless commands run;
        your own data is not touched.
    local
        With --drill: on a scratch pair on this machine, whose remote is cut and whose worker is
        lost, too.
    yes
        With --drill: do not ask before.
    """
    if local and not drill:
        raise UsageError("syncd doctor", why="--local goes with --drill")
    if drill:
        _drill(folder or Path(), local=local, yes=yes or local, json=json)
        return
    findings = _tell(run_checks(CHECKS, look_at(folder or Path())), _finding_line, json=json)
    code = exit_code(findings)
    if code is not ExitCode.OK:
        count = sum(finding.level is Level.WRONG for finding in findings)
        why = f"{count} of {len(findings)} things are wrong"
        raise _ERRORS[code]("syncd doctor", why=why)


def _drill(folder: Path, *, local: bool, yes: bool, json: bool) -> None:
    """Do the drills. Raises RunFailedError when one has failed."""
    if local:
        from syncd.doctor.scratch_pair import scratch_pair  # a worker's parts are Linux's alone

        pair = scratch_pair()
    else:
        layout = find_folder(folder)
        if not (yes or _agrees(layout)):
            raise UsageError("syncd doctor --drill", why="not agreed to", hint="--yes agrees.")
        pair = own_pair(layout)
    with pair as scene:
        outcomes = _tell(do_drills(scene), _drill_line, json=json)
    failed = [each.drill for each in outcomes if each.verdict is Verdict.FAILED]
    if failed:
        raise RunFailedError("syncd doctor --drill", why=f"failed: {', '.join(failed)}")


def _agrees(layout: Layout) -> bool:
    """Ask whether to go on; nobody at a terminal has not agreed."""
    print(
        f"This starts `syncd watch` in {layout.root}, appends harmless sh: commands to queue.txt,\n"
        "and kills and stalls that daemon, its rclone, and the children of a bridge meanwhile.",
        file=sys.stderr,
    )
    if not sys.stdin.isatty():
        return False
    print("Go on? [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _drill_line(outcome: Outcome) -> Text:
    line = Text(f"{outcome.verdict:<8}", style=_STYLES[outcome.verdict])
    line.append(f" {outcome.drill:<20} {outcome.seconds:>6.1f} s  ", style="default")
    return line.append(one_line(outcome.why or outcome.must), style="default")


def _finding_line(finding: Finding) -> Text:
    line = Text(f"{finding.level:<8}", style=_STYLES[finding.level])
    return line.append(f" {finding.check:<15} {finding.told()}", style="default")


def _tell(found: Iterable[Told], line: Callable[[Told], Text], *, json: bool) -> list[Told]:
    """Print what is found, as lines when it comes or all as JSON; return it."""
    if json:
        told = list(found)
        print(jsonlib.dumps([asdict(each) for each in told], indent=1, ensure_ascii=False))
        return told
    console, told = plain_console(), []
    for each in found:
        told.append(each)
        console.print(line(each), soft_wrap=True)
    return told
