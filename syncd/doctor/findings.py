"""What a check has found: how it is, what is there, what to do, and what a script is told."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from protocol.errors import ExitCode, UserError
from protocol.logs import one_line


class Level(StrEnum):
    """How it is. Only what is wrong keeps something from working."""

    OK = "ok"
    WARNING = "warning"
    WRONG = "wrong"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One line of the report. `todo` says what to do; `exit_code` is 0 unless it is wrong."""

    check: str
    level: Level
    found: str
    todo: str = ""
    exit_code: ExitCode = ExitCode.OK

    def told(self) -> str:
        """What was found and what to do, in one line."""
        return one_line(f"{self.found.rstrip('.')}. {self.todo}" if self.todo else self.found)


def ok(check: str, found: str) -> Finding:
    return Finding(check=check, level=Level.OK, found=found)


def warning(check: str, found: str, todo: str = "") -> Finding:
    return Finding(check=check, level=Level.WARNING, found=found, todo=todo)


def wrong(check: str, found: str, todo: str, code: ExitCode) -> Finding:
    return Finding(check=check, level=Level.WRONG, found=found, todo=todo, exit_code=code)


def from_error(check: str, error: UserError) -> Finding:
    """Return what an error of ours says as a finding: its hint is what to do."""
    parts = (error.what, error.path, error.why)
    found = ": ".join(part for part in parts if part)
    return wrong(check, found, error.hint, error.exit_code)


def exit_code(findings: Iterable[Finding]) -> ExitCode:
    """Return 0 when nothing is wrong, else the code of what to mend first.

    That is the lowest: the machine (1) and what a person wrote (3) go before data (4), the remote
    (5) and keys (6), which often are wrong because of them.
    """
    codes = [finding.exit_code for finding in findings if finding.level is Level.WRONG]
    return min(codes, default=ExitCode.OK)
