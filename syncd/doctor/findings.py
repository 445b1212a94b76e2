"""What a check has found: how it is, what is there, what to do, and what a script is told."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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
    """One line of the report. `todo` says what to do; `exit_code` is 0 unless it is wrong.

    `remote` names the remote that it is about, "" where it is about none.
    """

    check: str
    level: Level
    found: str
    todo: str = ""
    exit_code: ExitCode = ExitCode.OK
    remote: str = ""

    def told(self, *, of_several: bool = False) -> str:
        """What was found and what to do, in one line; on which remote, where there are several."""
        named = of_several and self.remote not in self.found
        found = f"{self.remote}: {self.found}" if named else self.found
        return one_line(f"{found.rstrip('.')}. {self.todo}" if self.todo else found)


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


def summary(findings: Sequence[Finding]) -> str:
    """Return the last line of the report: how many things are wrong, and which."""
    bad = [finding.check for finding in findings if finding.level is Level.WRONG]
    warnings = sum(finding.level is Level.WARNING for finding in findings)
    parts = [f"{len(bad)} of {len(findings)} wrong: {', '.join(dict.fromkeys(bad))}"] if bad else []
    parts += [f"{warnings} warning{'s' if warnings > 1 else ''}"] if warnings else []
    return "; ".join(parts if bad else ["nothing is wrong", *parts])


def exit_code(findings: Iterable[Finding]) -> ExitCode:
    """Return 0 when nothing is wrong, else the code of what to mend first.

    That is the lowest: the machine (1) and what a person wrote (3) go before data (4), the remote
    (5) and keys (6), which often are wrong because of them.
    """
    codes = [finding.exit_code for finding in findings if finding.level is Level.WRONG]
    return min(codes, default=ExitCode.OK)
