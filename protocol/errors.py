"""Errors that a person reads, and the exit codes that a script reads.

Every error of the three packages that a user can cause derives from `UserError`:

    UserError            what was being done, to which path, why it failed, what to do next
    |- UsageError        2   the command line or a setting is wrong
    |- ConfigError       3   a file that a person wrote is wrong: syncd.toml, stages.toml, queue.txt
    |- DataError         4   data is corrupt, cut short, foreign or stale
    |- RemoteError       5   the remote is missing or cannot be reached
    |- RefusedError      6   refused by rule: unknown stage, policy, seal, fenced
    |- BusyError         7   another process holds what is needed
    `- RunFailedError    8   a run ended, and not in success

Exit code 1 is kept for faults of ours (a traceback is printed), 130 for an interrupt.
"""

from __future__ import annotations

from enum import IntEnum
from os import PathLike
from typing import ClassVar


class ExitCode(IntEnum):
    """What a command's exit status means."""

    OK = 0
    FAULT = 1
    USAGE = 2
    CONFIG = 3
    DATA = 4
    REMOTE = 5
    REFUSED = 6
    BUSY = 7
    RUN_FAILED = 8
    INTERRUPTED = 130


class UserError(Exception):
    """A failure that the user can understand and mend.

    `what` says what was being done ("read the queue"), `path` to which file, `why` what went
    wrong, and `hint` what to do next. `str()` joins them into one message.
    """

    exit_code: ClassVar[ExitCode] = ExitCode.FAULT

    def __init__(
        self, what: str, *, why: str, path: str | PathLike[str] | None = None, hint: str = ""
    ) -> None:
        self.what = what
        self.path = None if path is None else str(path)
        self.why = why
        self.hint = hint
        super().__init__(self.message())

    def message(self) -> str:
        """Return one line, e.g. `read the pool: a.arrow: not Arrow. Rebuild it.`"""
        parts = [self.what]
        if self.path is not None:
            parts.append(self.path)
        parts.append(self.why)
        text = ": ".join(parts)
        return f"{text.rstrip('.')}. {self.hint}" if self.hint else text


class UsageError(UserError):
    exit_code = ExitCode.USAGE


class ConfigError(UserError):
    exit_code = ExitCode.CONFIG


class DataError(UserError):
    exit_code = ExitCode.DATA


class RemoteError(UserError):
    exit_code = ExitCode.REMOTE


class RefusedError(UserError):
    exit_code = ExitCode.REFUSED


class BusyError(UserError):
    exit_code = ExitCode.BUSY


class RunFailedError(UserError):
    exit_code = ExitCode.RUN_FAILED
