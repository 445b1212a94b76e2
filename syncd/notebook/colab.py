"""Google's own command-line client for Colab (PyPI: google-colab-cli), run as it is.

It needs Python 3.12, so it has an environment of its own and is never imported. It is `colab` on
the PATH, or what $SYNCD_COLAB says, with options of its own if need be: "colab --auth=adc".

What it is given on a command line, and the code that it runs, others may see: the one in lists of
processes, the other in its history, on the disk. So a secret goes in a file, as an upload.

Of 0.7.5, tried against a real Jupyter server: `exec` stays attached for as long as the code runs,
whatever its --timeout, and for ever to a kernel that is busy; when it is ended the code goes on. It
ends with 0 however the code has ended, and with 1 when it has lost touch. An upload to a hidden
name is refused.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from protocol.errors import (
    BusyError,
    ConfigError,
    RefusedError,
    RemoteError,
    UserError,
)
from syncd.platform import has_ended, own_session

VARIABLE = "SYNCD_COLAB"
# Whose commands, options and output these are; older ones have others.
OLDEST = (0, 7, 5)
CALL_SECONDS = 120.0
# A machine is made meanwhile.
CREATE_SECONDS = 600.0
END_SECONDS = 10.0
FOR_EVER = 1e6
INSTALL = (
    "Install it in an environment of its own: `uv tool install google-colab-cli`, or pipx; "
    "it needs Python 3.12."
)
LOGIN = "Log in once by hand: `colab sessions` says how."
BUSY = "Its kernel may be busy with a cell already. `syncd down --now` ends the session."
_VERSION = re.compile(r"\bVersion: (\d+)\.(\d+)\.(\d+)")
_SESSION = re.compile(r"^\[(?P<name>[^\]]+)\] \S+ \| Hardware: ", re.MULTILINE)
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
# What IPython says besides when code ends itself.
_ADVICE = re.compile(r"To exit: use 'exit'|^An exception has occurred, use %tb")


class Gpu(StrEnum):
    """What a session may be made with. The client takes a name that it does not know for an A100,
    so it is given none but these."""

    T4 = "T4"
    L4 = "L4"
    G4 = "G4"
    A100 = "A100"
    H100 = "H100"
    NONE = "none"


@dataclass(frozen=True)
class _Failure:
    """What the client says when something goes wrong, and what that is to us."""

    said: str
    error: type[UserError]
    why: str
    hint: str


_FAILURES = (
    _Failure(
        r"Backend rejected accelerator",
        RefusedError,
        "this account may not have such a GPU now",
        "Take another one: --gpu T4, say.",
    ),
    _Failure(
        r"Allocation refused|TooManyAssignments",
        BusyError,
        "this account has as many sessions as it may, or no such machine is free",
        "End one (`colab sessions` lists them, `colab stop -s NAME` ends one), wait, or take "
        "another --gpu.",
    ),
    _Failure(
        r"appears to be lost|Session '.*' not found",
        RemoteError,
        "the session has ended",
        "`syncd up` makes another one.",
    ),
    _Failure(
        r"To authorize colab-cli|No valid default credentials|RefreshError|Unauthorized|Forbidden",
        RemoteError,
        "the client is not logged in, or not for this",
        LOGIN,
    ),
    _Failure(
        r"ConnectionError|Max retries exceeded|TransportError|ConnectTimeout|ReadTimeout",
        RemoteError,
        "Colab cannot be reached",
        "Try again.",
    ),
)


def failure(what: str, output: str, code: int) -> UserError:
    """Return the error that a call of the client has ended with, by what it said."""
    for known in _FAILURES:
        if re.search(known.said, output):
            return known.error(what, why=known.why, hint=known.hint)
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    said = lines[-1][:500] if lines else "and said nothing"
    return RemoteError(what, why=f"the client ended with {code}: {said}")


class Attached:
    """The client while it is attached to code that runs in a session."""

    def __init__(self, process: subprocess.Popen[bytes], output: Path) -> None:
        self._process = process
        self.output = output

    def code(self) -> int | None:
        """The client's exit code, None while it is attached; 0 means that the code has ended."""
        return self._process.wait() if has_ended(self._process) else None

    def lines(self) -> list[str]:
        """What the code and the client have printed so far, without what tells nothing."""
        said = _COLOURS.sub("", self.output.read_text("utf-8", "replace"))
        lines = (line.strip() for line in said.splitlines())
        return [line for line in lines if line and not _ADVICE.search(line)]

    def leave(self) -> None:
        """End the client; the code goes on. Not by SIGINT, of which the kernel would hear."""
        if not has_ended(self._process):
            self._process.terminate()
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


@dataclass(frozen=True)
class Colab:
    """The client. Each method raises UserError: what the client could not do, and why."""

    command: tuple[str, ...]

    @classmethod
    def find(cls, environ: Mapping[str, str] = os.environ) -> Colab:
        """Return the client of this machine. Raises ConfigError where there is none."""
        words = shlex.split(environ.get(VARIABLE, "")) or ["colab"]
        found = shutil.which(words[0], path=environ.get("PATH"))
        if found is None:
            raise ConfigError(
                "use Google's client for Colab", path=words[0], why="there is none", hint=INSTALL
            )
        return cls((found, *words[1:]))

    def check(self) -> None:
        """Raise ConfigError for a client that is too old, or another program of that name."""
        said = self._call("ask Google's client for its version", ["version"])
        found = _VERSION.search(said)
        version = tuple(map(int, found.groups())) if found else ()
        if version < OLDEST:
            oldest = ".".join(map(str, OLDEST))
            raise ConfigError(
                "use Google's client for Colab",
                path=self.command[0],
                why=f"it says {said.strip()[:100]!r}, and {oldest} or later is needed",
                hint="Update it: `uv tool upgrade google-colab-cli`.",
            )

    def sessions(self) -> set[str]:
        """Return the names of the sessions that there are."""
        said = self._call("list the sessions", ["sessions"])
        return {match["name"] for match in _SESSION.finditer(said)}

    def create(self, name: str, gpu: Gpu) -> None:
        """Make a session: from here on it is paid for."""
        options = [] if gpu is Gpu.NONE else ["--gpu", str(gpu)]
        what = "make a session" if gpu is Gpu.NONE else f"make a session with a {gpu}"
        self._call(what, ["new", "-s", name, *options], seconds=CREATE_SECONDS)

    def upload(self, name: str, source: Path, target: str) -> None:
        """Make a file in the session, from a small one here."""
        self._call("upload a file", ["upload", "-s", name, str(source), target])

    def execute(self, name: str, code: str) -> str:
        """Run code in the session, which must end soon; return what it printed.

        Whether it failed the client does not tell.
        """
        return self._call("run code in the session", ["exec", "-s", name], given=code, hint=BUSY)

    def attach(self, name: str, code: Path, output: Path) -> Attached:
        """Run a file's code, which may go on for ever, with what it prints in `output`."""
        # Once its timeout is over the client would wait on without a pause.
        arguments = ["exec", "-s", name, "-f", str(code), "--timeout", f"{FOR_EVER:.0f}"]
        with open(output, "wb") as file:
            process = subprocess.Popen(
                [*self.command, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                **own_session(),  # Ctrl-C is for us: the client is to leave without a word
            )
        return Attached(process, output)

    def stop(self, name: str) -> None:
        """End a session, its machine and all on it; nothing when it has ended."""
        if name in self.sessions():
            self._call("end the session", ["stop", "-s", name])

    def _call(
        self,
        what: str,
        arguments: Sequence[str],
        *,
        given: str = "",
        seconds: float | None = None,
        hint: str = LOGIN,
    ) -> str:
        """Run the client, by default for `CALL_SECONDS` at most; return what it printed."""
        seconds = CALL_SECONDS if seconds is None else seconds
        try:
            done = subprocess.run(
                [*self.command, *arguments],
                input=given.encode("utf-8"),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                timeout=seconds,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            why = f"the client has not ended after {seconds:.0f} s"
            raise RemoteError(what, why=why, hint=hint) from error
        except OSError as error:
            raise ConfigError(
                what, path=self.command[0], why=error.strerror or str(error), hint=INSTALL
            ) from error
        said = done.stdout.decode("utf-8", "replace")
        if done.returncode:
            raise failure(what, said, done.returncode)
        return said
