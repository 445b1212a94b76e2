"""One run's context: its folders, its inputs, its progress and its report.

Under a runner all of it comes from the environment (`protocol/stage_env.py`), by hand from one
output folder (`trainer/standalone.py`).
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType

from filelock import BaseFileLock

from protocol.errors import DataError, RefusedError, UsageError
from protocol.names import RunId, canonical_stage, safe_relative
from protocol.progress import Progress
from protocol.publish import make_dirs, publish_json, remove_leftovers
from protocol.results import Artifact, Results, RunRecord, StageReport
from protocol.schema import decode, dumps, loads
from protocol.stage_env import StageEnvironment
from protocol.states import Result
from trainer.console import ProgressReporter, say
from trainer.files import writing
from trainer.hashing import file_sha256
from trainer.locks import locked
from trainer.standalone import forget, open_standalone


@dataclass(kw_only=True)
class Run:
    """One attempt of one run of one stage. Use as a context manager.

    A run by hand that fails before it has made anything leaves no trace, so that `--resume` finds
    the run that got further.

    `after` maps an earlier stage to the run id whose result this run is to use; `result_file` is
    where a runner wants the report, None by hand; `started` is seconds since the epoch.
    """

    run_id: str
    stage: str
    attempt: int
    artifact_dir: Path
    checkpoint_dir: Path
    store: Path
    results_path: Path
    after: Mapping[str, str] = field(default_factory=dict)
    result_file: Path | None = None
    progress_file: Path | None = None
    started: float = field(default_factory=time.time)
    lock: BaseFileLock | None = None

    def __post_init__(self) -> None:
        self._progress = ProgressReporter(self.progress_file)

    def __enter__(self) -> Run:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None and self.lock is not None:
            forget(self.artifact_dir, self.checkpoint_dir)
        self.close()

    def close(self) -> None:
        """Take the progress bar away and let another process have the run."""
        self._progress.close()
        if self.lock is not None:
            self.lock.release()

    def progress(
        self, step: float, total: float | None, unit: str = "step", message: str = ""
    ) -> None:
        """Say how far the run is; cheap enough to call at every step."""
        self._progress.update(Progress(step=step, total=total, unit=unit, message=message))

    def artifact(self, path: str | Path) -> Artifact:
        """Return the record of a published file: `path` is relative to `artifact_dir`, or in it."""
        full = self.artifact_dir / path
        name = safe_relative(full.relative_to(self.artifact_dir).as_posix())
        return Artifact(path=name, size=full.stat().st_size, sha256=file_sha256(full))

    def finish(self, report: StageReport) -> None:
        """Publish the report: for the runner, or by hand as a record in `results.json`.

        Raises ValueError when the report is of another run or could not be read again, BusyError
        when another process keeps `results.json` locked, DataError when it cannot be written.
        """
        if (report.run_id, report.stage) != (self.run_id, self.stage):
            raise ValueError(f"a report of {report.run_id}, given to {self.run_id}")
        # One unreadable report would make all of the results unreadable.
        decode(StageReport, loads(dumps(report.to_json())))
        with writing("publish the report", self.result_file or self.results_path):
            if self.result_file is not None:
                publish_json(self.result_file, report.to_json())
            else:
                self._record(report)

    def _record(self, report: StageReport) -> None:
        record = RunRecord(
            run_id=self.run_id,
            stage=self.stage,
            line=f"run:{self.stage}",
            result=Result.SUCCESS,
            exit_code=0,
            attempts=self.attempt,
            started=self.started,
            ended=time.time(),
            after=dict(report.inputs),
            report=report,
        )
        with locked(self.results_path.with_suffix(".lock")):
            results = Results.load(self.results_path)
            results.add(record)
            results.save(self.results_path)

    def input_run(self, stage: str, flag: str | None = None) -> str:
        """Return the run id of the earlier stage to build on.

        That is `flag` when given, else the one that the runner names, else, by hand, the newest
        successful one. Raises UsageError when `flag` is of another stage or nothing names one.
        """
        stage = canonical_stage(stage)
        if flag:
            return self._named_run(stage, flag)
        if stage in self.after:
            return self.after[stage]
        if self.result_file is not None:
            raise UsageError(
                f"find the {stage} run to use",
                why=f"the runner names none: SYNCD_AFTER has {sorted(self.after)}",
                hint=f'Add after = ["{stage}"] to this stage in stages.toml, or pass --from-run.',
            )
        numbers = [
            RunId.parse(record.run_id)
            for record in Results.load(self.results_path).runs.values()
            if record.stage == stage and record.result is Result.SUCCESS
        ]
        # By number and not by time: a clock may be wrong.
        newest = max(numbers, key=lambda run_id: run_id.number, default=None)
        if newest is None:
            raise UsageError(
                f"find the {stage} run to use",
                path=self.results_path,
                why="no successful one is recorded",
                hint=f"Run `trainer {stage}` first, with the same --output.",
            )
        say(f"building on {newest}, the newest successful {stage} run")
        return str(newest)

    def _named_run(self, stage: str, flag: str) -> str:
        what = f"use the run {flag[:80]!r}"
        try:
            parsed = RunId.parse(flag)
        except RefusedError as error:
            raise UsageError(what, why=error.why, hint=f"Such as {stage}.0001.0000.") from error
        if parsed.stage != stage:
            raise UsageError(what, why=f"{self.stage} builds on a run of stage {stage!r}")
        return str(parsed)

    def input_report(self, stage: str, run_id: str) -> StageReport:
        """Return what that run reported. Raises DataError as `Results.find` does."""
        return Results.load(self.results_path).find(run_id, stage, path=self.results_path)

    def input_artifact(self, stage: str, run_id: str, role: str) -> Path:
        """Return the path of another run's artefact, after checking its size and SHA-256.

        An arm's artefacts lie in the folder of the run it is an arm of. Raises DataError when the
        result does not name it, or the file is missing or is not the one that was reported.
        """
        report = self.input_report(stage, run_id)
        what = f"use the {role} of run {run_id}"
        if role not in report.artifacts:
            raise DataError(what, path=self.results_path, why=f"it made {sorted(report.artifacts)}")
        artifact = report.artifacts[role]
        base = str(replace(RunId.parse(run_id), arm=""))
        path = self.artifact_dir.parent / base / safe_relative(artifact.path)
        check_file(what, path, artifact)
        return path


def check_file(what: str, path: Path, artifact: Artifact) -> None:
    """Raise DataError unless the file at `path` has the artefact's size and SHA-256."""
    hint = "Run the stage that made it again, or fetch the file again."
    try:
        size = path.stat().st_size
        if size != artifact.size:
            why = f"{size} bytes long; its run reported {artifact.size}"
        elif file_sha256(path) != artifact.sha256:
            why = "its SHA-256 is not the one that its run reported"
        else:
            return
    except OSError as error:
        why = error.strerror or str(error)
    raise DataError(what, path=path, why=why, hint=hint)


def open_run(
    stage: str,
    *,
    output: Path,
    run_id: str | None = None,
    resume: bool = False,
    environ: Mapping[str, str] = os.environ,
) -> Run:
    """Return the context of a run, with its folders made.

    Under a runner `environ` decides and the other arguments are not looked at. By hand the run is
    `run_id`; or, with `resume`, the newest unfinished one of this stage; or a new one.

    Raises UsageError when the environment, `run_id` or `resume` does not fit, BusyError when
    another process is at this run.
    """
    stage = canonical_stage(stage)
    given = StageEnvironment.from_environ(environ)
    if given is not None:
        return _adopt(stage, given)
    opened = open_standalone(stage, output, run_id=run_id, resume=resume)
    return Run(stage=stage, **vars(opened))


def _adopt(stage: str, given: StageEnvironment) -> Run:
    what, run_id = f"run {stage}", RunId.parse(given.run_id)
    if given.stage != stage:
        raise UsageError(
            what,
            why=f"the runner started this program for stage {given.stage!r}",
            hint="Correct the stage's command in stages.toml.",
        )
    if run_id.stage != stage or run_id.arm:
        raise UsageError(what, why=f"SYNCD_RUN_ID is {run_id}, which is no run of {stage!r}")
    for name, value in vars(given).items():
        if isinstance(value, Path) and not value.is_absolute():
            why = f"SYNCD_{name.upper()} is {str(value)!r}; it must be an absolute path"
            raise UsageError(what, why=why)
    for folder in (given.artifact_dir, given.checkpoint_dir):
        with writing("make the run's folders", folder):
            make_dirs(folder)
            remove_leftovers(folder)
    return Run(
        run_id=given.run_id,
        stage=stage,
        attempt=given.attempt,
        artifact_dir=given.artifact_dir,
        checkpoint_dir=given.checkpoint_dir,
        store=given.store,
        results_path=given.results,
        after=given.after,
        result_file=given.result_file,
        progress_file=given.progress_file,
    )
