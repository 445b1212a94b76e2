"""A run's curves: one JSON object a line, and TensorBoard event files, without doubled steps.

    {"step": 120, "time": 1764489600.5, "train/loss": 0.31, "train/lr": 0.0008}

`time` is seconds since the epoch. A resumed run drops what was recorded beyond the step that it
resumes from, and TensorBoard is told to do the same (`purge_step`).
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path

from torch.utils.tensorboard import SummaryWriter

from protocol.publish import make_dirs, publish_bytes, remove_leftovers
from trainer.files import writing

METRICS = "metrics.jsonl"
TENSORBOARD = "tensorboard"
FLUSH_S = 5.0


class MetricsWriter:
    """Writes `metrics.jsonl` and `tensorboard/` in a folder; to be closed.

    Records are kept in memory and written every few seconds and at the end, so that a step never
    waits for a disk.
    """

    def __init__(self, directory: Path, *, resume_step: int = 0) -> None:
        self.path = directory / METRICS
        with writing("keep the curves", self.path):
            make_dirs(directory)
            remove_leftovers(directory)
            _keep_until(self.path, resume_step)
        self._lines: list[str] = []
        self._flush_at = time.monotonic() + FLUSH_S
        self._events = SummaryWriter(
            str(directory / TENSORBOARD), purge_step=resume_step + 1, flush_secs=round(FLUSH_S)
        )

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Record values at a step. Raises ValueError when one is not finite."""
        record = {"step": step, "time": round(time.time(), 3), **values}
        self._lines.append(json.dumps(record, allow_nan=False) + "\n")
        for name, value in values.items():
            self._events.add_scalar(name, value, step)
        if time.monotonic() >= self._flush_at:
            self.flush()

    def flush(self) -> None:
        """Hand what was recorded so far to the operating system. Raises DataError when it fails."""
        with writing("keep the curves", self.path):
            with open(self.path, "a", encoding="utf-8") as file:
                file.writelines(self._lines)
            self._lines.clear()
            self._events.flush()
        self._flush_at = time.monotonic() + FLUSH_S

    def close(self) -> None:
        try:
            self.flush()
        finally:
            self._events.close()


def read_metrics(path: Path) -> list[dict[str, float]]:
    """Return the records of a `metrics.jsonl`, in order.

    A line that a crash or a full disk left torn is passed over: curves are for looking at, and no
    reason not to resume a run.
    """
    if not path.exists():
        return []
    text = path.read_text(encoding="utf-8", errors="replace")
    records = (_record(line) for line in text.splitlines(keepends=True) if line.endswith("\n"))
    return [record for record in records if record is not None]


def _record(line: str) -> dict[str, float] | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) and isinstance(record.get("step"), int) else None


def _keep_until(path: Path, step: int) -> None:
    if path.exists():
        kept = [record for record in read_metrics(path) if record["step"] <= step]
        text = "".join(json.dumps(record) + "\n" for record in kept)
        publish_bytes(path, text.encode("utf-8"))
