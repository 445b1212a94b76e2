"""Run checks side by side, each with a time-out: one that fails or hangs hides no other."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from protocol.errors import ExitCode, UserError
from syncd.doctor.findings import Finding, from_error, wrong
from syncd.doctor.patient import Patient

# What a check that is interrupted has for taking back what it did.
CLEANUP_SECONDS = 20.0


@dataclass(frozen=True)
class Check:
    """A check. `run` yields what it finds; it should end soon once the event is set."""

    name: str
    run: Callable[[Patient, threading.Event], Iterator[Finding]]
    seconds: float = 30.0


class _Running:
    """A check at work, in a thread of its own that keeps nobody from leaving."""

    def __init__(self, check: Check, patient: Patient, stop: threading.Event) -> None:
        self.check = check
        self.found: list[Finding] = []
        self._patient = patient
        self._stop = stop
        self._deadline = time.monotonic() + check.seconds
        # Not by joining the thread: a join that Ctrl-C interrupts takes it for ended (Python 3.11).
        self._done = threading.Event()
        threading.Thread(target=self._run, name=check.name, daemon=True).start()

    def _run(self) -> None:
        try:
            self._collect()
        finally:
            self._done.set()

    def _collect(self) -> None:
        name = self.check.name
        try:
            for finding in self.check.run(self._patient, self._stop):
                self.found.append(finding)
        except UserError as error:
            self.found.append(from_error(name, error))
        except OSError as error:
            why = f"{error.filename or name}: {error.strerror or error}"
            self.found.append(wrong(name, why, "", ExitCode.DATA))
        except Exception as error:
            told = f"a fault of the check's own: {error!r}"
            self.found.append(wrong(name, told, "Please report it.", ExitCode.FAULT))

    def results(self) -> list[Finding]:
        """Wait until it is done or its time is up; return what it has found."""
        done = self._done.wait(max(self._deadline - time.monotonic(), 0.0))
        found = list(self.found)
        if not done:
            told = f"no answer after {self.check.seconds:.0f} s"
            code = ExitCode.REMOTE if self.check.name == "remote" else ExitCode.DATA
            found.append(wrong(self.check.name, told, _HANGS, code))
        return found

    def finish(self) -> None:
        """Give it the time to take back what it did."""
        self._done.wait(CLEANUP_SECONDS)


_HANGS = "Something that it asked hangs: a mount, a disk, a program or the network; look there."


def run_checks(checks: Sequence[Check], patient: Patient) -> Iterator[Finding]:
    """Yield what the checks find, in their order, each as soon as those before it are done.

    When the caller stops early (Ctrl-C), the checks are told, and may take back what they did.
    """
    stop = threading.Event()
    running = [_Running(check, patient, stop) for check in checks]
    try:
        for each in running:
            yield from each.results()
    finally:
        stop.set()
        for each in running:
            each.finish()
