"""What a person at the laptop does: writes serve/, appends to the queue, edits both."""

from __future__ import annotations

import json
import random
import shutil
import sys
from pathlib import Path

from protocol.paths import Layout
from protocol.queue import encode_script

PROGRAM = Path(__file__).with_name("program.py")
STAGES = """
[stages.{name}]
command = [{python}, "-I", "-S", "program.py", "{mode}"]
env = {{ WITNESS = {witness} }}
after = [{after}]
retries = {retries}
gpu = {gpu}
grace = 0.2
"""
RETRIES = {"quick": 3, "next": 3, "flaky": 3, "bad": 1, "slow": 50, "tree": 50}
MODES = {"next": "quick"}
GPU = {"slow": 0.5, "tree": 0.5}


class Person:
    """A person at the laptop. `version` is the payload's, told in two of its files."""

    def __init__(self, layout: Layout, witness: Path) -> None:
        self.version = 0
        self._layout = layout
        self._witness = witness
        self._write_payload()

    def _write_payload(self) -> None:
        serve = self._layout.serve
        shutil.copy(PROGRAM, serve)
        text = "".join(
            STAGES.format(
                name=name,
                python=json.dumps(sys.executable),
                mode=MODES.get(name, name),
                witness=json.dumps(str(self._witness)),
                after='"quick"' if name == "next" else "",
                retries=retries,
                gpu=GPU.get(name, 0),
            )
            for name, retries in RETRIES.items()
        )
        (serve / "stages.toml").write_text(text)
        self.edit_payload()

    def edit_payload(self) -> None:
        """Change two files of serve/, one of them as an editor does."""
        self.version += 1
        serve = self._layout.serve
        # In place, by one write: half a save, which a busy machine may draw out, is a version too.
        with open(serve / "a.txt", "r+" if self.version > 1 else "w", encoding="utf-8") as file:
            file.write(f"{self.version:06d}\n")
        (serve / "b.new").write_text(f"{self.version:06d}\n")
        (serve / "b.new").rename(serve / "b.txt")

    def line(self, command: str, number: int) -> str:
        """The queue's line for a command of a plan; some must differ from all others."""
        if command == "sh":
            python = sys.executable
            return encode_script(f"exec {python} -I -S {PROGRAM} sh {self._witness} # {number}")
        return f"what is this? {number}" if command == "malformed" else command

    def append(self, line: str) -> None:
        with open(self._layout.queue, "a", encoding="utf-8") as queue:
            queue.write(f"{line}\n")

    def save_queue(self, line: str, rng: random.Random) -> None:
        """Save the queue as an editor does, with one more line, in another order."""
        queue = self._layout.queue
        lines = [*queue.read_text("utf-8").splitlines(), line]
        rng.shuffle(lines)
        aside = queue.with_name("queue.txt~")
        aside.write_text("".join(f"{text}\n" for text in lines), "utf-8")
        aside.rename(queue)
