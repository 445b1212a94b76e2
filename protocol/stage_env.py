"""What the runner tells a stage, as environment variables.

    SYNCD_RUN_ID          this run, e.g. pretrain.0012.7f3a
    SYNCD_STAGE           the canonical stage name
    SYNCD_ATTEMPT         1, and one more for each retry or resume
    SYNCD_CHECKPOINT_DIR  folder of this run's checkpoints; survives a retry and a new VM
    SYNCD_ARTIFACT_DIR    folder of what this run makes for others; it travels to the laptop
    SYNCD_RESULT_FILE     where to write the run's report (see protocol/results.py)
    SYNCD_PROGRESS_FILE   where to write progress (see protocol/progress.py)
    SYNCD_STORE           the durable store: checkpoints/ and champion/
    SYNCD_PAYLOAD         the snapshot of serve/ that this run was started with
    SYNCD_RESULTS         results.json, with every earlier run
    SYNCD_AFTER           JSON object: for each stage in `after`, the run id that satisfied it

All paths are absolute.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from protocol.errors import UsageError, UserError
from protocol.names import RunId, canonical_stage
from protocol.schema import loads


@dataclass(frozen=True, kw_only=True)
class StageEnvironment:
    """The environment of one attempt of one run."""

    run_id: str
    stage: str
    attempt: int
    checkpoint_dir: Path
    artifact_dir: Path
    result_file: Path
    progress_file: Path
    store: Path
    payload: Path
    results: Path
    after: Mapping[str, str] = field(default_factory=dict)

    def to_environ(self) -> dict[str, str]:
        """Return the variables to set."""
        return {
            "SYNCD_RUN_ID": self.run_id,
            "SYNCD_STAGE": self.stage,
            "SYNCD_ATTEMPT": str(self.attempt),
            "SYNCD_CHECKPOINT_DIR": str(self.checkpoint_dir),
            "SYNCD_ARTIFACT_DIR": str(self.artifact_dir),
            "SYNCD_RESULT_FILE": str(self.result_file),
            "SYNCD_PROGRESS_FILE": str(self.progress_file),
            "SYNCD_STORE": str(self.store),
            "SYNCD_PAYLOAD": str(self.payload),
            "SYNCD_RESULTS": str(self.results),
            "SYNCD_AFTER": json.dumps(dict(self.after)),
        }

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> StageEnvironment | None:
        """Read the variables; None when SYNCD_RUN_ID is not set, that is, outside a runner.

        Raises UsageError when some are set and others are missing or malformed.
        """
        if not environ.get("SYNCD_RUN_ID"):
            return None
        names = list(cls.__dataclass_fields__)
        missing = [n for n in (f"SYNCD_{n.upper()}" for n in names) if n not in environ]
        if missing:
            raise UsageError(
                "read the stage's environment",
                why=f"SYNCD_RUN_ID is set but {', '.join(missing)} is not",
                hint="Unset SYNCD_RUN_ID to run by hand, or start it through a queue line.",
            )
        try:
            after = loads(environ["SYNCD_AFTER"].encode("utf-8"))
            if not isinstance(after, dict):
                raise ValueError("SYNCD_AFTER is not an object")
            return cls(
                run_id=str(RunId.parse(environ["SYNCD_RUN_ID"])),
                stage=canonical_stage(environ["SYNCD_STAGE"]),
                attempt=int(environ["SYNCD_ATTEMPT"]),
                checkpoint_dir=Path(environ["SYNCD_CHECKPOINT_DIR"]),
                artifact_dir=Path(environ["SYNCD_ARTIFACT_DIR"]),
                result_file=Path(environ["SYNCD_RESULT_FILE"]),
                progress_file=Path(environ["SYNCD_PROGRESS_FILE"]),
                store=Path(environ["SYNCD_STORE"]),
                payload=Path(environ["SYNCD_PAYLOAD"]),
                results=Path(environ["SYNCD_RESULTS"]),
                after={canonical_stage(k): str(RunId.parse(v)) for k, v in after.items()},
            )
        except (ValueError, TypeError, UserError) as error:
            raise UsageError("read the stage's environment", why=str(error)) from error
