"""Gathers the evidence of an episode from the folders that it has left."""

from __future__ import annotations

from pathlib import Path

from evidence import EndSeen, Statement
from world import End, World

from protocol.errors import DataError
from protocol.journal import parse_journal
from protocol.results import Results

# What a daemon says when it has met what should not be.
FAULTS = ("a fault in", "bytes of this log are missing", "by hand", "Traceback")


def read_testimony(path: Path) -> list[Statement]:
    try:
        lines = path.read_text().splitlines()
    except FileNotFoundError:
        return []
    found = []
    for line in lines:
        event, machine, run, attempt, *details = line.split(" ")
        found.append(Statement(event, machine, run, int(attempt), tuple(details)))
    return found


def see(end: End) -> EndSeen:
    layout = end.layout
    data = layout.journal.read_bytes() if layout.journal.exists() else b""
    artifacts = (p for p in layout.artifacts.glob("*/*") if not p.name.endswith(".tmp"))
    try:
        results = Results.load(layout.results).runs
    except DataError:
        results = {}  # a bad look tells of it
    return EndSeen(
        journal=parse_journal(data)[0],
        results=results,
        logs={path.name: path.read_bytes() for path in layout.inbox.glob("*.log")},
        artifacts=frozenset(f"{path.parent.name}/{path.name}" for path in artifacts),
    )


def said_of_faults(world: World) -> list[str]:
    """What daemons and supervisors said of faults of their own, and ends that nobody asked for."""
    found = list(world.ended_by_itself)
    for end in world.ends:
        if end.output.exists():
            lines = end.output.read_text("utf-8", "replace").splitlines()
            found += [f"{end.output.name}: {text}" for text in lines if _is_fault(text)]
        for path in end.layout.runs.glob("*/attempt-*/supervisor.log"):
            found += [f"{path}: {text}" for text in path.read_text().splitlines()[-1:]]
    return found


def _is_fault(line: str) -> bool:
    return any(fault in line for fault in FAULTS)


def leftovers(world: World) -> list[str]:
    """Temporary files of ours that nobody will ever remove."""
    return [str(path) for end in world.ends for path in end.layout.root.rglob(".*.tmp")]


def count_objects(world: World) -> int:
    """How many files the fullest folder of the remote has."""
    folders = [p for p in (world.folder / "remote").iterdir() if p.is_dir()]
    return max((sum(1 for _ in folder.iterdir()) for folder in folders), default=0)
