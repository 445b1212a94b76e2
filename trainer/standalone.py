"""The folders of runs by hand: which run to open, and that no other process is at it.

    <output>/artifacts/<run id>/          what the run makes for others
    <output>/store/checkpoints/<run id>/  its checkpoints, and run.json: when it began, how often
    <output>/store/champion/              the gate's champion
    <output>/results.json                 every finished run

A run that has no record in `results.json` is unfinished; opened again by its run id, or with
`resume`, it goes on from its newest checkpoint.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from filelock import BaseFileLock

from protocol.errors import RefusedError, UsageError
from protocol.names import RunId
from protocol.publish import make_dirs, publish_json, remove_leftovers
from protocol.results import Results, RunRecord
from trainer.files import read_record, writing
from trainer.locks import locked

ORIGIN = "0000"
LOCK = ".lock"
RUN = "run.json"


@dataclass(frozen=True, kw_only=True)
class Opened:
    """A run by hand, with its folders made and its lock taken. `started` as in `Run`."""

    run_id: str
    attempt: int
    started: float
    artifact_dir: Path
    checkpoint_dir: Path
    store: Path
    results_path: Path
    lock: BaseFileLock


def open_standalone(stage: str, output: Path, *, run_id: str | None, resume: bool) -> Opened:
    """Open `run_id`; or, with `resume`, the newest unfinished run of the stage; or a new one.

    Raises UsageError when `run_id` or `resume` does not fit, BusyError when another process is at
    the run, DataError when the folders cannot be written or a record in them is damaged.
    """
    output = output.absolute()
    with writing("open the run", output):
        return _open(stage, output, run_id=run_id, resume=resume)


def _open(stage: str, output: Path, *, run_id: str | None, resume: bool) -> Opened:
    artifacts, store = output / "artifacts", output / "store"
    for folder in (artifacts, store / "champion", store / "checkpoints"):
        make_dirs(folder)
    results_path = output / "results.json"
    finished = Results.load(results_path).runs
    if run_id is not None:
        chosen = _check_run_id(stage, run_id, finished)
    elif resume:
        chosen = _newest_unfinished(stage, artifacts, finished)
    else:
        chosen = _claim_number(stage, artifacts, finished)
    checkpoint_dir = store / "checkpoints" / chosen
    try:
        for folder in (artifacts / chosen, checkpoint_dir):
            make_dirs(folder)
        lock = locked(checkpoint_dir / LOCK, timeout=0.0)
    except OSError:
        # A number that was claimed in vain is free again; a folder with something in it stays.
        with contextlib.suppress(OSError):
            (artifacts / chosen).rmdir()
        raise
    try:
        for folder in (output, artifacts / chosen, checkpoint_dir):
            remove_leftovers(folder)
        attempts = _note_attempt(checkpoint_dir / RUN)
    except BaseException:
        forget(artifacts / chosen, checkpoint_dir)
        lock.release()
        raise
    return Opened(
        run_id=chosen,
        attempt=attempts.attempt,
        started=attempts.started,
        artifact_dir=artifacts / chosen,
        checkpoint_dir=checkpoint_dir,
        store=store,
        results_path=results_path,
        lock=lock,
    )


def _check_run_id(stage: str, run_id: str, finished: Mapping[str, RunRecord]) -> str:
    parsed = None
    with contextlib.suppress(RefusedError):
        parsed = RunId.parse(run_id)
    if parsed is None or parsed.stage != stage or parsed.arm:
        raise UsageError(
            f"use the run id {run_id[:80]!r}",
            why=f"not a run of stage {stage!r}",
            hint=f"Write it as {stage}.0001.{ORIGIN}, or leave it out.",
        )
    if str(parsed) in finished:
        raise UsageError(
            f"use the run id {run_id}",
            why="that run has already ended",
            hint="Leave --run-id out to start a new run.",
        )
    return str(parsed)


def _runs_of(stage: str, artifacts: Path) -> list[RunId]:
    runs = []
    for entry in artifacts.iterdir():
        # A folder that is no run's, such as a copy that someone made, is none of our business.
        with contextlib.suppress(RefusedError):
            runs.append(RunId.parse(entry.name))
    return sorted((run for run in runs if run.stage == stage), key=lambda run: run.number)


def _newest_unfinished(stage: str, artifacts: Path, finished: Mapping[str, RunRecord]) -> str:
    left = [str(run) for run in _runs_of(stage, artifacts) if str(run) not in finished]
    if not left:
        raise UsageError(
            f"resume {stage}",
            path=artifacts,
            why="no unfinished run of this stage",
            hint="Leave --resume out to start a new run.",
        )
    return left[-1]


def _claim_number(stage: str, artifacts: Path, finished: Mapping[str, RunRecord]) -> str:
    taken = [run.number for run in _runs_of(stage, artifacts)]
    taken += [RunId.parse(r).number for r, record in finished.items() if record.stage == stage]
    number = max(taken, default=0) + 1
    while True:
        run_id = str(RunId(stage=stage, number=number, origin=ORIGIN))
        try:
            # Making the folder is the claim: of two processes one succeeds.
            (artifacts / run_id).mkdir()
        except FileExistsError:
            number += 1
        else:
            return run_id


def forget(artifact_dir: Path, checkpoint_dir: Path) -> None:
    """Remove the folders of a run that has made nothing, as long as its lock is held.

    Anything in them but our own notes, and they stay.
    """
    ours = {LOCK, RUN}
    if any(artifact_dir.iterdir()) or any(p.name not in ours for p in checkpoint_dir.iterdir()):
        return
    (checkpoint_dir / RUN).unlink(missing_ok=True)
    (checkpoint_dir / LOCK).unlink(missing_ok=True)
    checkpoint_dir.rmdir()
    artifact_dir.rmdir()


@dataclass(frozen=True, kw_only=True)
class _Attempts:
    """The content of `run.json`: how often the run was started, and when first."""

    attempt: int
    started: float


def _note_attempt(path: Path) -> _Attempts:
    hint = "Delete this file; the checkpoints beside it stay good."
    before = read_record(_Attempts, path, what="read how often the run was started", hint=hint)
    if before is None:
        before = _Attempts(attempt=0, started=time.time())
    noted = _Attempts(attempt=before.attempt + 1, started=before.started)
    publish_json(path, asdict(noted))
    return noted
