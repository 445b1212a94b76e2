"""`results.json`: every run's result, by run id and canonical stage name.

    {"version": 1, "digest": "<sha256>", "runs": {"pretrain.0001.7f3a": {...}}}

`digest` covers `runs` in canonical JSON, so that an edit by hand is noticed and never judged.
A run's record says how it ended (`Result`, cause, times), and carries the `StageReport` that the
stage itself wrote. A stage with arms (fine-tuning: `full`, `lp-ft`) reports each as a run of its
own, with the run id `<run id>.<arm>`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from protocol.errors import DataError
from protocol.files import read_regular
from protocol.names import RunId, canonical_stage
from protocol.publish import publish_json
from protocol.schema import decode, dumps, loads
from protocol.states import Result

VERSION = 1
MAX_REPORT_BYTES = 4 * 1024 * 1024
# Less than schema.MAX_DEPTH, since a report travels inside of a record inside of a message.
MAX_REPORT_DEPTH = 32


@dataclass(frozen=True, kw_only=True)
class Artifact:
    """A file that a run made: path below the run's artifact folder, size in bytes, SHA-256."""

    path: str
    size: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class StageReport:
    """What a stage says of its own run, written to `$SYNCD_RESULT_FILE`.

    `metrics` are plain numbers; `data_hash` names the data (a pool's content hash), `code_hash`
    the program's source; `durations` are seconds by phase; `artifacts` by role ("encoder",
    "bundle"); `inputs` the run id of each earlier stage whose artefacts were used; `verdict` is
    the gate's, `detail` anything more, for a person.
    """

    run_id: str
    stage: str
    metrics: Mapping[str, float] = field(default_factory=dict)
    data_hash: str = ""
    code_hash: str = ""
    config: Mapping[str, Any] = field(default_factory=dict)
    seed: int | None = None
    durations: Mapping[str, float] = field(default_factory=dict)
    artifacts: Mapping[str, Artifact] = field(default_factory=dict)
    inputs: Mapping[str, str] = field(default_factory=dict)
    verdict: str = ""
    detail: Mapping[str, Any] = field(default_factory=dict)
    arms: Mapping[str, StageReport] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if canonical_stage(self.stage) != self.stage:
            raise ValueError(f"stage {self.stage!r} is not canonical")
        base = RunId.parse(self.run_id)
        if base.stage != self.stage:
            raise ValueError(f"run id {self.run_id!r} is not one of stage {self.stage!r}")
        for arm, report in self.arms.items():
            if report.run_id != str(dataclasses.replace(base, arm=arm)):
                raise ValueError(f"arm {arm!r} has the run id {report.run_id!r}")

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """One run: how it ended and what it reported. Times are seconds since the epoch, UTC."""

    run_id: str
    stage: str
    line: str
    result: Result
    cause: str = ""
    exit_code: int | None = None
    signal: int | None = None
    attempts: int = 0
    started: float | None = None
    ended: float | None = None
    snapshot: int = 0
    after: Mapping[str, str] = field(default_factory=dict)
    report: StageReport | None = None

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def read_report(path: Path, *, run_id: str, stage: str) -> StageReport:
    """Read the report that a stage wrote, and check that it is this run's.

    Raises DataError when it is missing, too large, not JSON, malformed or of another run.
    """
    try:
        data = read_regular(path, MAX_REPORT_BYTES + 1)
        if len(data) > MAX_REPORT_BYTES:
            raise ValueError(f"larger than {MAX_REPORT_BYTES} bytes")
        report = decode(StageReport, loads(data, max_depth=MAX_REPORT_DEPTH))
    except (OSError, ValueError) as error:
        why = error.strerror or str(error) if isinstance(error, OSError) else str(error)
        raise DataError("read the stage's report", path=path, why=why) from error
    if (report.run_id, report.stage) != (run_id, stage):
        raise DataError(
            "read the stage's report",
            path=path,
            why=f"it is of run {report.run_id} of stage {report.stage}, not of {run_id}",
        )
    return report


class Results:
    """The runs of `results.json`, looked up by run id and canonical stage name."""

    def __init__(self, runs: Iterable[RunRecord] = ()) -> None:
        self.runs: dict[str, RunRecord] = {run.run_id: run for run in runs}

    def add(self, run: RunRecord) -> None:
        """Add a run, or replace the record with its id."""
        self.runs[run.run_id] = run

    def find(self, run_id: str, stage: str, *, path: Path | None = None) -> StageReport:
        """Return the report of exactly this run of exactly this stage; an arm's run id serves too.

        Raises DataError when the run is not there, is of another stage, did not succeed or
        reported nothing: a stale or foreign result is an error, never an answer. Raises
        RefusedError for what is no run id, ConfigError for what is no stage name.
        """
        what, stage = f"look up run {run_id} of stage {stage}", canonical_stage(stage)
        parsed = RunId.parse(run_id)
        run = self.runs.get(str(dataclasses.replace(parsed, arm="")))
        if run is None:
            raise DataError(what, path=path, why="no such run in the results")
        if run.stage != stage:
            raise DataError(what, path=path, why=f"that run is of stage {run.stage!r}")
        if run.result is not Result.SUCCESS:
            raise DataError(what, path=path, why=f"it ended as {run.result}: {run.cause}")
        report = run.report
        if report is not None and parsed.arm:
            report = report.arms.get(parsed.arm)
        if report is None:
            raise DataError(what, path=path, why="it left no report")
        return report

    def save(self, path: Path) -> None:
        """Publish `results.json` atomically."""
        runs = loads(dumps({run_id: run.to_json() for run_id, run in self.runs.items()}))
        publish_json(path, {"version": VERSION, "digest": _digest(runs), "runs": runs})

    @classmethod
    def load(cls, path: Path) -> Results:
        """Read `results.json`; empty when the file is missing.

        Raises DataError when it is not JSON, of a newer version, malformed, or edited by hand.
        """
        what = "read the results"
        try:
            value = loads(path.read_bytes())
            if not isinstance(value, dict) or not isinstance(value.get("runs"), dict):
                raise ValueError("not a results file")
            if value.get("version") != VERSION:
                raise ValueError(f"version {value.get('version')!r}; this program reads {VERSION}")
            runs = {k: decode(RunRecord, v) for k, v in value["runs"].items()}
        except FileNotFoundError:
            return cls()
        except OSError as error:
            raise DataError(what, path=path, why=error.strerror or str(error)) from error
        except ValueError as error:
            raise DataError(what, path=path, why=str(error), hint=_MEND) from error
        if value.get("digest") != _digest(value["runs"]) or any(
            run_id != run.run_id for run_id, run in runs.items()
        ):
            raise DataError(what, path=path, why="changed since it was written", hint=_MEND)
        return cls(runs.values())


_MEND = (
    "Move it away: `syncd watch` on the worker writes it anew from its own records; by hand, "
    "`trainer STAGE --run-id RUN` records each run anew from its checkpoints."
)


def _digest(runs: Mapping[str, Any]) -> str:
    text = json.dumps(runs, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()
