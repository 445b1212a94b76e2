"""What the trainer says to a person while it works, on stderr: stdout is the outcome's alone."""

from __future__ import annotations

import math
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from protocol.progress import Progress, write_progress

if TYPE_CHECKING:
    from rich.progress import Progress as Bar
    from rich.progress import TaskID

MIN_INTERVAL_S = 0.25


def say(text: str) -> None:
    """Say on stderr how the work goes."""
    print(text, file=sys.stderr, flush=True)


def warn(text: str) -> None:
    """Say on stderr what went wrong and was got over."""
    say(f"trainer: warning: {text}")


class ProgressReporter:
    """Shows a run's progress: in `path` for a runner, else as a bar on a terminal's stderr.

    Without either it does nothing. At most four updates a second are written, and always the one
    that reaches the total.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._next = 0.0
        self._bar: Bar | None = None
        self._task: TaskID | None = None

    def update(self, progress: Progress) -> None:
        now = time.monotonic()
        if now < self._next and (progress.step != progress.total or self._next == math.inf):
            return
        self._next = now + MIN_INTERVAL_S
        if self._path is not None:
            self._write(self._path, progress)
        elif sys.stderr.isatty():
            self._draw(progress)

    def _write(self, path: Path, progress: Progress) -> None:
        # Progress is a courtesy: a run that works is not to end because nobody can see it.
        try:
            write_progress(path, progress)
        except OSError as error:
            warn(f"progress is not shown any more: {path}: {error.strerror or error}")
            self._next = math.inf

    def _draw(self, progress: Progress) -> None:
        if self._bar is None or self._task is None:
            from rich.console import Console
            from rich.progress import Progress as Bar

            self._bar = Bar(console=Console(stderr=True), transient=True)
            self._bar.start()
            self._task = self._bar.add_task("")
        self._bar.update(
            self._task,
            completed=progress.step,
            total=progress.total,
            description=f"{progress.unit} {progress.step:g} {progress.message}".rstrip(),
        )

    def close(self) -> None:
        """Take the bar off the terminal."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
