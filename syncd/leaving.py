"""When a worker with nothing to do leaves, and what it says of that to who has started it.

A machine that is paid by the hour is to be released once nothing on it is needed any more: nothing
has run or waited for long, and all that was made is safe elsewhere. `judge` decides that; `Left` is
what a worker writes when it leaves, for the notebook's cell, which releases the machine.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from enum import StrEnum

from protocol.errors import DataError
from protocol.paths import Layout
from protocol.publish import publish_json
from protocol.schema import decode, loads
from protocol.status import duration


class Reason(StrEnum):
    """Why a worker has left."""

    IDLE = "idle"  # nothing was to be done: the machine is not needed any more
    FENCED = "fenced"  # another worker has taken over
    STOPPED = "stopped"  # it was asked to, by a signal


@dataclass(frozen=True, kw_only=True)
class Left:
    """How a worker left, at `time`; `why` is what its last status says."""

    reason: Reason
    why: str
    time: float


def write_left(layout: Layout, reason: Reason, why: str) -> None:
    """Say that the worker of this folder leaves, and why."""
    left = Left(reason=reason, why=why, time=time.time())
    publish_json(layout.left, asdict(left), mode=0o600)


def read_left(layout: Layout) -> Left | None:
    """Return how the last worker left this folder; None where it did not, or another has begun.

    It is written just before the worker ends: it has gone once nobody holds the folder's lock.
    Raises DataError for a file that is damaged.
    """
    try:
        return decode(Left, loads(layout.left.read_bytes()))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise DataError("read how the worker left", path=layout.left, why=str(error)) from error


class Verdict(StrEnum):
    """Whether a worker may leave, or what of it is still needed; its value tells a person."""

    LEAVE = ""
    BUSY = "something runs or waits, or did so lately"
    NOT_SENT = "not all that was made here has been sent"
    NOT_HEARD = "the controller has not received all, and the remote may be on its own machine"
    NOT_KEPT = "the remote does not show all that was sent"


@dataclass(frozen=True, kw_only=True)
class Outlook:
    """What a worker's leaving depends on.

    `quiet`: for how many seconds nothing has run or waited. `sent`: whether all that was made is on
    the remote. `durable`: whether that outlives the machines of both ends. `heard`: whether the
    controller has taken all in. `kept`: whether the remote was just seen to have all.
    """

    quiet: float
    sent: bool
    durable: bool
    heard: bool
    kept: bool


def judge(outlook: Outlook, after: float) -> Verdict:
    """Say whether a worker may leave that is to do so once it was quiet for `after` seconds.

    What is on a durable remote need not have been heard: whoever pays for the machine may have
    closed the laptop for the weekend.
    """
    if outlook.quiet < after:
        return Verdict.BUSY
    if not outlook.sent:
        return Verdict.NOT_SENT
    if not (outlook.durable or outlook.heard):
        return Verdict.NOT_HEARD
    return Verdict.LEAVE if outlook.kept else Verdict.NOT_KEPT


class Quiet:
    """For how long nothing has run or waited, by the monotonic clock."""

    def __init__(self) -> None:
        self._since = time.monotonic()
        self._mark: object = None

    def look(self, *, busy: bool, mark: object) -> float:
        """Return for how many seconds it has been quiet. `mark` changes with all that happens."""
        if busy or mark != self._mark:
            self._since, self._mark = time.monotonic(), mark
        return 0.0 if busy else time.monotonic() - self._since


def told_idle(after: float) -> str:
    """Return why a worker leaves that had nothing to do for so long, for its last status."""
    told = duration(after)
    for unit in ("s", "min", "h"):
        told = told.removesuffix(f" 0 {unit}")
    return f"stopped: nothing to do for {told}"
