"""Scenarios of power cuts: code whose durable steps are recorded, and what it promises by them.

A scenario is recorded once for each process of the tests, and then judged in three ways: as it
is; with one of its syncs left out, which must break a promise; and killed at each of its steps,
started again where it was, and only then struck by the power cut.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import pytest
from powercut import Check, Recording, Verdict, judge, materialise, scratch
from powercut_recorder import Recorder

Done: TypeAlias = Callable[[str], None]


def nothing(root: Path) -> None:
    """Start in an empty folder."""


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """`act` is recorded in a folder that `start` has made, durably, and says what is `done`.

    `check` is given a folder as a power cut left it, which is its own to change, and what was done
    by then; it raises when a promise is broken. `syncs` are those that `act` makes, by name;
    `spare` are those of them that are for what a killed predecessor may have left: nothing fails
    here without them, and something does in another scenario. `restart` is what a process does
    that comes after one that was killed; `act` if it is None.
    """

    name: str
    act: Callable[[Path, Done], None]
    check: Check
    syncs: Sequence[str]
    spare: Sequence[str] = ()
    start: Callable[[Path], None] = nothing
    restart: Callable[[Path, Done], None] | None = None

    def __str__(self) -> str:
        return self.name

    def record(self, root: Path) -> Recording:
        """Record `act` in a new folder."""
        root.mkdir()
        self.start(root)
        with Recorder(root) as recorder:
            self.act(root, recorder.done)
        return recorder.recording

    def judge(self, folder: Path, *, without: str = "") -> tuple[Recording, Verdict]:
        """Check what power cuts leave; `without` names a sync that is left out."""
        if self.name not in _RECORDED:
            _RECORDED[self.name] = self.record(folder / "recorded")
        recording = _RECORDED[self.name]
        return recording, judge(recording, self.check, without=without)

    def judge_killed(self, folder: Path) -> Iterator[Verdict]:
        """Kill `act` at each step, go on from there, and check what power cuts leave then."""
        recording, _ = self.judge(folder)
        for before, cache in recording.kills():
            with scratch() as place:
                root = place / "killed"
                materialise(cache, root)
                with Recorder(root, after=before) as recorder:
                    (self.restart or self.act)(root, recorder.done)
            yield judge(recorder.recording, self.check)


_RECORDED: dict[str, Recording] = {}


def each_sync(scenarios: Sequence[Scenario]) -> Any:
    """Parametrise a test by each sync of each scenario."""
    pairs = [
        pytest.param(scenario, sync, id=f"{scenario}: {sync}")
        for scenario in scenarios
        for sync in scenario.syncs
        if sync not in scenario.spare
    ]
    return pytest.mark.parametrize(("scenario", "sync"), pairs)


def each_killed(scenarios: Sequence[Scenario], *, long: Collection[str] = ()) -> Any:
    """Parametrise a test by scenarios; those named in `long` run in the long form of the tests."""
    marked = [
        pytest.param(each, id=each.name, marks=[pytest.mark.long] if each.name in long else [])
        for each in scenarios
    ]
    return pytest.mark.parametrize("scenario", marked)


def assert_kept(scenario: Scenario, folder: Path) -> None:
    """A power cut at any moment breaks no promise, and the syncs are those that are listed."""
    recording, verdict = scenario.judge(folder)
    assert not verdict.wrong, verdict.wrong
    assert recording.syncs == list(scenario.syncs), recording.syncs
    print(f"| {scenario} | {len(recording.steps)} | {verdict.states} | {len(recording.syncs)} |")


def assert_needed(scenario: Scenario, sync: str, folder: Path) -> None:
    """Without this sync some power cut breaks a promise."""
    _, verdict = scenario.judge(folder, without=sync)
    assert verdict.wrong, f"nothing fails without it in {verdict.states} states"


def assert_kept_after_kills(scenario: Scenario, folder: Path) -> None:
    """A process killed at any step, a new one, and then a power cut break no promise."""
    verdicts = list(scenario.judge_killed(folder))
    assert verdicts, "nothing was written"
    wrong = [verdict.wrong for verdict in verdicts if verdict.wrong]
    assert not wrong, wrong[0]
    print(f"| {scenario} | {len(verdicts)} | {sum(verdict.states for verdict in verdicts)} |")
