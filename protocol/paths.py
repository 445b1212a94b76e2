"""The shared folder's layout, and who writes what in it.

queue.txt               controller   one command a line
serve/                  controller   stages.toml, scripts, packs, wheels, the pool index
in/                     worker       status.txt, results.json, journal.jsonl, <stage>.log,
                                     artifacts/, checkpoints.json
store/                  worker       the durable store: checkpoints/, champion/
syncd.toml              the person   settings of this end
.syncd/                 the daemon   this end's own state; never travels
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from protocol.names import SHELL_STAGE, RunId, canonical_stage


@dataclass(frozen=True)
class Layout:
    """Paths below the root of one end's shared folder."""

    root: Path

    @property
    def queue(self) -> Path:
        return self.root / "queue.txt"

    @property
    def serve(self) -> Path:
        return self.root / "serve"

    @property
    def inbox(self) -> Path:
        return self.root / "in"

    @property
    def store(self) -> Path:
        return self.root / "store"

    @property
    def settings(self) -> Path:
        return self.root / "syncd.toml"

    @property
    def private(self) -> Path:
        return self.root / ".syncd"

    @property
    def key(self) -> Path:
        return self.private / "key"

    @property
    def runs(self) -> Path:
        return self.private / "runs"

    @property
    def fence(self) -> Path:
        """The worker's note that another has taken over; supervisors look for it by themselves."""
        return self.private / "fenced.json"

    @property
    def left(self) -> Path:
        """How the last worker's daemon left, until another one starts; JSON."""
        return self.private / "left.json"

    @property
    def problems(self) -> Path:
        """What the controller's daemon has to say of itself: a list of texts, as JSON."""
        return self.private / "problems.json"

    @property
    def unsent(self) -> Path:
        """What waits at the controller to be sent, while something does; JSON."""
        return self.private / "unsent.json"

    @property
    def status(self) -> Path:
        return self.inbox / "status.txt"

    @property
    def results(self) -> Path:
        return self.inbox / "results.json"

    @property
    def journal(self) -> Path:
        return self.inbox / "journal.jsonl"

    @property
    def checkpoint_index(self) -> Path:
        return self.inbox / "checkpoints.json"

    @property
    def artifacts(self) -> Path:
        return self.inbox / "artifacts"

    def log(self, stage: str) -> Path:
        """The log of a stage. Raises ConfigError for a name that is none."""
        return self.inbox / f"{canonical_stage(stage)}.log"

    def shell_log(self, number: int) -> Path:
        """The log of the `sh:` command with this number."""
        return self.inbox / f"sh-{number}.log"

    def run_log(self, run_id: str) -> Path:
        """The log that a run writes to. Raises RefusedError for a text that is no run id."""
        run = RunId.parse(run_id)
        return self.shell_log(run.number) if run.stage == SHELL_STAGE else self.log(run.stage)
