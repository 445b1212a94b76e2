"""What a worker's predecessors last said of themselves: for the causes of what they left behind."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from protocol.logs import one_line, stamp
from protocol.schema import decode
from protocol.status import Status, render_progress
from protocol.wire import Writer
from syncd.state import State

_KEY = "last heard"


class LastHeard:
    """The last status of each predecessor, kept in the state."""

    def __init__(self, state: State) -> None:
        self._state = state

    def note(self, writer: Writer, status: Mapping[str, Any]) -> None:
        """Keep what a predecessor said of itself. Raises ValueError when it is malformed."""
        told = decode(Status, status)
        # Of what waited and what had ended the journal tells.
        kept = replace(told, waiting=(), ended=(), problems=())
        self._state.put(_KEY, self._state.get(_KEY, {}) | {str(writer): asdict(kept)})

    def cause(self, worker: str, run_id: str) -> str:
        """Why a run that `worker` had taken has no end of its own: one line for a person."""
        kept = self._state.get(_KEY, {}).get(worker)
        if kept is None:
            return f"VM gone: {worker}"
        status = decode(Status, kept)
        parts = [f"VM gone: {worker} on {one_line(status.host)}, last heard {stamp(status.time)}"]
        for run in status.running:
            if run.run_id == run_id and run.progress:
                parts.append(render_progress(run.progress, bar=False))
            if run.run_id == run_id and run.last_line:
                parts.append(f"last line: {one_line(run.last_line)}")
        return "; ".join(parts)
