"""Drives items from a source through stages, and knows how far the run is.

The driver below is the synchronous one: one item at a time through all stages, in the caller's
thread. Stages, hooks and state are the same for any driver.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from enum import StrEnum
from itertools import accumulate, pairwise
from typing import Any

from protocol.errors import DataError, UsageError
from trainer.engine.stage import Activity, Item, Source, Stage, StageClock, failures_named

Hook = Callable[[Item[Any]], None]


class Mode(StrEnum):
    """How a pipeline is driven."""

    SYNC = "sync"


class Pipeline:
    """A source, its stages in order, and hooks.

    `after_step` hooks are called with each item that left the last stage, in order of sequence
    numbers, `after_epoch` hooks with the one that ends an epoch; `state_dict` may be called from
    a hook and is then exact: it counts the hook's item as consumed.
    """

    def __init__(
        self,
        source: Source[Any],
        stages: Sequence[Stage[Any, Any]],
        *,
        after_step: Sequence[Hook] = (),
        after_epoch: Sequence[Hook] = (),
    ) -> None:
        names = [source.name, *(stage.name for stage in stages)]
        if len(set(names)) != len(names):
            raise UsageError("build the pipeline", why=f"two stages have one name: {names}")
        self.source = source
        self.stages = list(stages)
        self.after_step = list(after_step)
        self.after_epoch = list(after_epoch)
        self.consumed = 0
        self.clocks = {name: StageClock() for name in names}

    def run(self, mode: Mode = Mode.SYNC) -> None:
        """Drive what is left of the source to its end.

        Raises StageError naming stage, item and samples, or a stage's own UserError with them as
        a note. Whatever happens, every stage is closed.
        """
        drivers = {Mode.SYNC: self._run_sync}
        with ExitStack() as stack:
            for stage in self.stages:
                stack.callback(stage.close)
            drivers[mode]()

    def _run_sync(self) -> None:
        items = iter(self.source)
        while True:
            marks = [time.perf_counter()]
            with failures_named(self.source.name):
                item = next(items, None)
            if item is None:
                return
            marks.append(time.perf_counter())
            for stage in self.stages:
                with failures_named(stage.name, item):
                    item = stage.process(item)
                marks.append(time.perf_counter())
            self._finish(item)
            marks.append(time.perf_counter())
            self._account(marks)

    def _finish(self, item: Item[Any]) -> None:
        self.consumed = item.seq + 1
        for hook in self.after_step:
            hook(item)
        if item.last:
            for hook in self.after_epoch:
                hook(item)

    def _account(self, marks: Sequence[float]) -> None:
        # With one item at a time a stage starves while those before it work, and is blocked
        # while those after it and the hooks do; the three add up to the wall clock.
        spans = [after - before for before, after in pairwise(marks)]
        before = [0.0, *accumulate(spans)]
        for at, clock in enumerate(self.clocks.values()):
            clock.items += 1
            clock.add(Activity.STARVED, before[at])
            clock.add(Activity.BUSY, spans[at])
            clock.add(Activity.BLOCKED, before[-1] - before[at + 1])

    def state_dict(self) -> dict[str, Any]:
        """Return the state of everything after the items consumed so far."""
        return {
            "consumed": self.consumed,
            "source": dict(self.source.state_dict(self.consumed)),
            "stages": {stage.name: dict(stage.state_dict()) for stage in self.stages},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken. Raises DataError when the stages are others."""
        names = [stage.name for stage in self.stages]
        if list(state["stages"]) != names:
            raise DataError(
                "resume the pipeline",
                why=f"the state has the stages {list(state['stages'])}, this run {names}",
                hint="Start a new run.",
            )
        self.source.load_state_dict(state["source"])
        for stage in self.stages:
            stage.load_state_dict(state["stages"][stage.name])
        self.consumed = int(state["consumed"])

    def report(self) -> dict[str, dict[str, float]]:
        """Return, by stage in order, items and seconds busy, starved and blocked."""
        return {name: clock.report() for name, clock in self.clocks.items()}
