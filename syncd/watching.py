"""Daemons that are started and ended from here: for the demo, the drills and the benchmark."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType

from protocol.errors import RunFailedError
from protocol.paths import Layout
from syncd.platform import die_with_parent, has_ended, own_session

STOP_SECONDS = 30.0


class Watch:
    """The daemon of one end, in a session of its own. What it prints is added to `output`.

    `environ` is its environment, by default one without the caller's own settings. On Linux it dies
    with the thread that starts it, however that ends.
    """

    def __init__(
        self, layout: Layout, output: Path, *, environ: Mapping[str, str] | None = None
    ) -> None:
        self.layout = layout
        self.output = output
        self._environ = environ
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it; returns at once."""
        if self._process is not None:
            raise RuntimeError("it has been started")
        with open(self.output, "ab") as output:
            command = [sys.executable, "-m", "syncd", "watch", "--folder", str(self.layout.root)]
            self._process = subprocess.Popen(
                die_with_parent(command),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment() if self._environ is None else self._environ,
                **own_session(),
            )

    @property
    def pid(self) -> int:
        """Its process id. Raises RuntimeError when it was not started."""
        if self._process is None:
            raise RuntimeError("it was not started")
        return self._process.pid

    def kill(self) -> None:
        """End it at once, as SIGKILL does; nothing when it does not run."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def stop(self) -> None:
        """Ask it to end, and wait until it has; nothing when it does not run."""
        if self._process is not None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_SECONDS)
            self.kill()

    def check(self) -> None:
        """Raise RunFailedError when it was started and has ended by itself."""
        if self._process is not None and has_ended(self._process):
            lines = self.output.read_text("utf-8", "replace").splitlines()
            why = f"it ended by itself: {lines[-1] if lines else 'and said nothing'}"
            raise RunFailedError("run syncd watch", path=self.layout.root, why=why)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Run it while the block does. Raises RunFailedError when it ended by itself meanwhile."""
        self.start()
        try:
            yield
            self.check()
        finally:
            self.stop()


@contextlib.contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """Let SIGTERM end the block as Ctrl-C does, so that what was started in it is ended."""

    def interrupt(signum: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def environment() -> dict[str, str]:
    """The environment of a daemon: nothing of the caller's own ends, and this Python as `python`.

    The stages run `python`, and the virtual environment need not be the active one.
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SYNCD_")}
    # Not resolved: a virtual environment's python is a link out of the environment.
    folders = [str(Path(sys.executable).parent), kept.get("PATH", "")]
    return kept | {"PATH": os.pathsep.join(filter(None, folders))}
