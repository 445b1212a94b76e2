"""Looks at what is visible, all the time: what a reader finds must be whole at any moment."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path

from protocol.errors import DataError
from protocol.journal import parse_journal
from protocol.paths import Layout
from protocol.results import Results


class Looks:
    """Looks at the files that changed since the last look; `bad` says what was not whole."""

    def __init__(self) -> None:
        self.bad: list[str] = []
        self.count = 0
        self._seen: dict[Path, tuple[int, int, int]] = {}

    def look(self, layout: Layout) -> None:
        """Look at every visible file of an end that is another than it was."""
        for path, check in _visible(layout):
            try:
                found = path.stat()
                key = (found.st_ino, found.st_size, found.st_mtime_ns)
                if self._seen.get(path) == key:
                    continue
                why = check(path)
            except FileNotFoundError:
                continue
            self._seen[path] = key
            self.count += 1
            if why:
                self.bad.append(f"{path}: {why}")


def _visible(layout: Layout) -> Iterator[tuple[Path, Callable[[Path], str]]]:
    yield layout.results, check_results
    yield layout.journal, check_journal
    yield layout.status, check_status
    yield layout.checkpoint_index, check_json
    yield layout.private / "status.json", check_json
    for folder in (layout.artifacts, layout.store / "checkpoints"):
        for path in folder.glob("*/*.bin"):
            yield path, check_hash
    for path in layout.runs.glob("*/attempt-*/*.json"):
        yield path, check_json


def check_results(path: Path) -> str:
    """Return what is wrong with a `results.json`, or ""."""
    try:
        Results.load(path)
    except DataError as error:
        return error.why
    return ""


def check_journal(path: Path) -> str:
    """Every line must be a record but the last, which may be on its way."""
    data = path.read_bytes()
    _, problems = parse_journal(data[: data.rfind(b"\n") + 1])
    return f"line {problems[0].line_number}: {problems[0].why}" if problems else ""


def check_status(path: Path) -> str:
    text = path.read_text("utf-8")
    whole = text.startswith("worker ") and "\ndisk free " in text and text.endswith("\n")
    return "" if whole else f"not whole: {text[:80]!r}"


def check_json(path: Path) -> str:
    try:
        json.loads(path.read_bytes())
    except ValueError as error:
        return f"no JSON: {error}"
    return ""


def check_hash(path: Path) -> str:
    """The hash of what the program wrote stands in the name."""
    told = path.stem.rpartition("-")[2]
    return "" if hashlib.sha256(path.read_bytes()).hexdigest()[:16] == told else "other bytes"
