"""`syncd demo`: the main job on one machine, as a person would do it.

Two folders stand for two machines, with rclone's local backend between them. Each end is a real
`syncd watch`; the commands are lines appended to the laptop's `queue.txt`, and all that is shown
is read from the laptop's folder.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from protocol.errors import DataError, RunFailedError, UsageError
from protocol.logs import parse_log_line
from protocol.paths import Layout
from protocol.publish import make_dirs
from protocol.queue import encode_script
from protocol.results import Results, RunRecord, StageReport
from protocol.states import Result, State
from protocol.wire import Role
from syncd.delivery.contents import file_sha256
from syncd.demo.display import Display
from syncd.platform import check_worker_system
from syncd.setup import initialise
from syncd.show import plain_console
from syncd.view import CommandView, append_commands, read_commands, read_status
from syncd.watching import Watch

STAGES = ("pretrain", "finetune", "export", "gate")
SCRIPT = "echo the worker is $(hostname); uname -sr; date -u"
SERVED = Path(__file__).with_name("serve")
MARKER = ".syncd-demo"
ENDS = ("laptop", "vm", "remote")
SAMPLE = 2000
TIMEOUT_SECONDS = 900.0
LOOK_SECONDS = 0.2


def run_demo(folder: Path, *, keep: bool) -> dict[str, Any]:
    """Run the main job in `folder`; return what came back.

    Raises RunFailedError when a command did not succeed or the gate judged another model than the
    one exported here, UsageError when `folder` holds something that is not a demo's.
    """
    check_worker_system()
    console = plain_console(stderr=True)
    laptop, vm = (Layout(folder / name) for name in ENDS[:2])
    began = time.monotonic()
    _clear(folder, keep=keep)
    _prepare(console, folder, laptop, vm)
    lines = [f"run:{stage}" for stage in STAGES] + [encode_script(SCRIPT)]
    watches = [Watch(end, end.root.with_suffix(".log")) for end in (laptop, vm)]
    with watches[0].running(), watches[1].running():
        known = max((view.number for view in read_commands(laptop)), default=0)
        console.print(f"appending to {laptop.queue}: {' '.join(lines[:-1])} and one sh:")
        append_commands(laptop, lines)
        with Display(console) as display:
            views = _follow(laptop, display, after=known, count=len(lines))
            _check_success(laptop, views)
            runs = _wait_for_artifacts(laptop, views)
    outcome = _judge(laptop, views, runs)
    outcome["seconds"] = round(time.monotonic() - began, 1)
    _print_outcome(console, laptop, outcome)
    return outcome


def _clear(folder: Path, *, keep: bool) -> None:
    there = [name for name in ENDS if (folder / name).exists()]
    if there and not (folder / MARKER).exists():
        raise UsageError(
            "syncd demo",
            path=folder,
            why=f"it has {there[0]}/, and no demo made it",
            hint="Give another --folder.",
        )
    make_dirs(folder)
    (folder / MARKER).touch()
    for name in () if keep else there:
        shutil.rmtree(folder / name)


def _prepare(console: Console, folder: Path, laptop: Layout, vm: Layout) -> None:
    """Make both ends and the payload: the stages, and a pool of real clips."""
    if laptop.settings.exists():
        return
    remote = str(folder / "remote")
    make_dirs(Path(remote))
    make_dirs(laptop.serve)
    for source in SERVED.iterdir():
        shutil.copy2(source, laptop.serve / source.name)
    console.print(f"building a pool of real clips in {laptop.serve / 'pool'}")
    pool, index = str(laptop.serve / "pool"), str(laptop.serve / "index.json")
    _trainer("pool", "build", "--output", pool)
    _trainer("pool", "sample", pool, "--size", str(SAMPLE), "--seed", "0", "--output", index)
    initialise(laptop, role=Role.CONTROLLER, remote=remote)
    initialise(vm, role=Role.WORKER, remote=remote, key_file=laptop.key)


def _trainer(*arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "trainer", *arguments], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RunFailedError(
            f"demo, trainer {' '.join(arguments[:2])}",
            why=done.stderr.strip()[-2000:],
            hint="The demo needs the extra: pip install 'syncd[demo]'.",
        )


def _follow(laptop: Layout, display: Display, *, after: int, count: int) -> list[CommandView]:
    """Show how the commands go, as the laptop's folder tells it, until all have ended."""
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while True:
        views = [view for view in read_commands(laptop) if view.number > after]
        display.update(views, read_status(laptop))
        if len(views) == count and all(view.state is State.ENDED for view in views):
            return views
        if time.monotonic() > deadline:
            raise RunFailedError(
                "demo",
                why=f"not done after {TIMEOUT_SECONDS:.0f} s",
                path=laptop.root.parent,
                hint="laptop.log and vm.log there say more.",
            )
        time.sleep(LOOK_SECONDS)


def _check_success(laptop: Layout, views: list[CommandView]) -> None:
    for view in views:
        if view.result is not Result.SUCCESS:
            raise RunFailedError(
                f"demo, {view.run_id}",
                why=f"{view.result}: {view.cause}",
                path=laptop.inbox,
                hint="Its log there says more.",
            )


def _wait_for_artifacts(laptop: Layout, views: list[CommandView]) -> dict[str, RunRecord]:
    """Wait until every artefact that a result names has arrived whole; return the runs."""
    deadline = time.monotonic() + 60.0
    missing = "results.json"
    while time.monotonic() < deadline:
        runs = Results.load(laptop.results).runs
        if all(view.run_id in runs for view in views):
            missing = _first_missing(laptop, [runs[view.run_id] for view in views])
            if not missing:
                return {runs[view.run_id].stage: runs[view.run_id] for view in views}
        time.sleep(LOOK_SECONDS)
    raise DataError("demo", path=laptop.inbox, why=f"{missing} did not arrive")


def _first_missing(laptop: Layout, runs: list[RunRecord]) -> str:
    """Return the first artefact that is not here, or an unfinished log; "" when all is here."""
    for run in runs:
        for artifact in run.report.artifacts.values() if run.report else ():
            path = laptop.artifacts / run.run_id / artifact.path
            if not path.exists() or file_sha256(path) != artifact.sha256:
                return f"{run.run_id}/{artifact.path}"
        log = laptop.run_log(run.run_id)
        last = log.read_bytes().splitlines()[-1:] if log.exists() else []
        if not last or parse_log_line(last[0]) is None:
            return log.name
    return ""


def _judge(
    laptop: Layout, views: list[CommandView], runs: Mapping[str, RunRecord]
) -> dict[str, Any]:
    """Check that the gate judged the very model that this demo's export made."""
    export, gate = _report(runs, "export"), _report(runs, "gate")
    if gate.inputs.get("export") != export.run_id:
        raise RunFailedError(
            "demo, gate", why=f"it judged {gate.inputs.get('export')}, not {export.run_id}"
        )
    judged = gate.detail.get("bundle", {}).get("sha256")
    if judged != export.artifacts["bundle"].sha256:
        raise RunFailedError("demo, gate", why="the bundle it judged is not the one exported")
    if gate.verdict not in ("promote", "hold"):
        raise RunFailedError("demo, gate", why=f"its verdict is {gate.verdict!r}")
    artifacts = laptop.artifacts / export.run_id
    return {
        "verdict": gate.verdict,
        "why": str(gate.detail.get("why", "")),
        "exported": export.run_id,
        "encoder": str(artifacts / export.artifacts["encoder"].path),
        "onnx": str(artifacts / export.artifacts["model"].path),
        "bundle": str(artifacts / export.artifacts["bundle"].path),
        "metrics": dict(gate.metrics),
        "commands": [asdict(view) for view in views],
    }


def _report(runs: Mapping[str, RunRecord], stage: str) -> StageReport:
    report = runs[stage].report
    if report is None:
        raise RunFailedError(f"demo, {stage}", why="it left no report")
    return report


def _print_outcome(console: Console, laptop: Layout, outcome: Mapping[str, Any]) -> None:
    console.print(f"\nin {laptop.inbox} after {outcome['seconds']:.0f} s:")
    for path in sorted(p for p in laptop.inbox.iterdir() if p.is_file()):
        console.print(f"  {path.name:<20} {path.stat().st_size:>9,} bytes")
    for name in ("encoder", "onnx", "bundle"):
        path = Path(outcome[name])
        console.print(f"  {path.relative_to(laptop.inbox)}  {path.stat().st_size:,} bytes")
    console.print(f"the gate's verdict on {outcome['exported']}: {outcome['verdict']}")
    if outcome["why"]:
        console.print(f"  {outcome['why']}")
