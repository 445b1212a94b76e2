"""The command `syncd doctor`: looks, prints, and says by its exit code what to mend first."""

from __future__ import annotations

import json as jsonlib
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated, TypeVar

from cyclopts import Parameter
from rich.text import Text

from protocol.errors import ExitCode, UsageError
from protocol.logs import one_line
from protocol.paths import Layout
from protocol.queue import readable
from protocol.wire import Role
from syncd.cli import Flag, Folder, Json
from syncd.doctor.bridge import check_bridge
from syncd.doctor.checks import Check, run_checks
from syncd.doctor.drill import Outcome, Verdict, do_drills
from syncd.doctor.findings import Finding, Level, exit_code, summary
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
from syncd.doctor.scene import Scene
from syncd.doctor.writers import check_worker
from syncd.show import plain_console
from syncd.view import find_folder
from syncd.watching import ended_by_sigterm

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
    Check("bridge", check_bridge),
    Check("remote", check_remote, seconds=120.0),
    Check("worker", check_worker),
)
_STYLES: dict[StrEnum, str] = {
    Level.OK: "green",
    Level.WARNING: "yellow",
    Level.WRONG: "bold red",
    Verdict.PASSED: "green",
    Verdict.SKIPPED: "yellow",
    Verdict.FAILED: "bold red",
}


def doctor(
    *,
    role: Role | None = None,
    folder: Folder = None,
    json: Json = False,
    drill: Flag = False,
    local: Flag = False,
    yes: Annotated[bool, Parameter(name=["--yes", "-y"], negative=())] = False,
) -> ExitCode:
    """The command; what it does is said where it is registered, in `syncd.cli`.

    Parameters
    ----------
    role
        `controller` or `worker`; else from $SYNCD_ROLE, syncd.toml, or what `syncd watch` was here.
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
        return _drill(folder or Path(), local=local, yes=yes or local, json=json)
    patient = look_at(folder or Path(), role=role)
    several = bool(patient.settings and patient.settings.fallback)
    line = partial(_finding_line, several=several)
    findings = _tell(run_checks(CHECKS, patient), line, json=json)
    if not json:
        print(summary(findings))
    return exit_code(findings)


def _drill(folder: Path, *, local: bool, yes: bool, json: bool) -> ExitCode:
    """Do the drills; return RUN_FAILED when one has failed."""
    if local:
        from syncd.doctor.scratch_pair import scratch_pair  # a worker's parts are Linux's alone

        pair = scratch_pair(tell=_tell_progress)
    else:
        layout = find_folder(folder)
        if not (yes or _agrees(layout)):
            raise UsageError("syncd doctor --drill", why="not agreed to", hint="--yes agrees.")
        pair = own_pair(layout, tell=_tell_progress)
    with ended_by_sigterm(), pair as scene:
        try:
            outcomes = _tell(do_drills(scene), _drill_line, json=json)
        finally:
            if not local:
                _tell_lines(scene)
    failed = [each.drill for each in outcomes if each.verdict is Verdict.FAILED]
    if not json:
        done = f"{len(failed)} of {len(outcomes)} failed: {', '.join(failed)}"
        print(done if failed else "none failed")
    return ExitCode.RUN_FAILED if failed else ExitCode.OK


def _tell_progress(what: str) -> None:
    print(what, file=sys.stderr, flush=True)


def _tell_lines(scene: Scene) -> None:
    """Say which lines stand in the person's queue now, and what became of them."""
    became = scene.became()
    if not became:
        return
    told = [f"Added to {scene.layout.queue}, where they stay, since a queue is only added to:"]
    for line, view in became.items():
        state = f"{view.run_id}  {view.result or view.state}" if view else "not taken up yet"
        told.append(f"{view.number if view else '':>6}  {readable(line)[:30]}...  {state}")
    if not all(view and view.result for view in became.values()):
        told.append("What has not ended prints its lines at the worker in its turn, and ends.")
    print(*told, sep="\n", file=sys.stderr)


def _agrees(layout: Layout) -> bool:
    """Ask whether to go on; nobody at a terminal has not agreed."""
    print(
        f"This starts `syncd watch` in {layout.root}, appends harmless sh: commands to queue.txt,\n"
        "which stay there, and kills and stalls that daemon, its rclone, and the children of a\n"
        "bridge meanwhile. A tunnel whose URL would be another one then is spared, unless the\n"
        "worker is seen on a second remote, by which it finds the new URL.",
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


def _finding_line(finding: Finding, *, several: bool) -> Text:
    line = Text(f"{finding.level:<8}", style=_STYLES[finding.level])
    told = finding.told(of_several=several)
    return line.append(f" {finding.check:<15} {told}", style="default")


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
