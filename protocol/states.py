"""Where a command is in its life (`State`), and how it ended (`Result`): two enums.

Legal transitions: queued -> claimed -> started -> ended, and to ended from anywhere before it.
A retry stays in `started` with a higher attempt number.
"""

from __future__ import annotations

from enum import StrEnum


class State(StrEnum):
    """Where a command is in its life."""

    QUEUED = "queued"
    CLAIMED = "claimed"
    STARTED = "started"
    ENDED = "ended"


class Result(StrEnum):
    """How a command ended."""

    SUCCESS = "success"
    FAILED = "failed"  # the program ended with an exit code other than 0
    KILLED = "killed"  # by a signal that was not ours, out of memory included
    STOPPED = "stopped"  # by a stop: line
    TIMED_OUT = "timed_out"
    FAILED_TO_SPAWN = "failed_to_spawn"
    SKIPPED = "skipped"  # what it comes after did not succeed
    REFUSED = "refused"  # malformed, unknown stage, policy
    LOST = "lost"  # an at-most-once command whose worker went away


_NEXT: dict[State, frozenset[State]] = {
    State.QUEUED: frozenset({State.CLAIMED, State.ENDED}),
    State.CLAIMED: frozenset({State.STARTED, State.ENDED}),
    State.STARTED: frozenset({State.STARTED, State.ENDED}),
    State.ENDED: frozenset(),
}


def is_legal(before: State, after: State) -> bool:
    """Whether the journal may record `after` for a command whose newest record is `before`."""
    return after in _NEXT[before]
