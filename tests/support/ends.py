"""Both ends of a shared folder, each with a real `syncd watch` that a test may kill and restart."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from waiting import eventually

from protocol.journal import JournalRecord, fold, parse_journal
from protocol.paths import Layout
from protocol.queue import encode_script
from protocol.results import Results
from protocol.states import State
from protocol.wire import Role
from syncd.setup import initialise

PATIENCE = 60.0


class End:
    """One end. `start` and `kill` are about its daemon; stages live on."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.process: subprocess.Popen[bytes] | None = None
        self.environ: dict[str, str] = {}
        self.arguments: Sequence[str] = ()  # more, of `syncd watch`
        self.prefix: Sequence[str] = ()  # runs its daemon somewhere else, as a server's does

    def start(self) -> None:
        assert self.process is None
        environ = {k: v for k, v in os.environ.items() if not k.startswith("SYNCD_")}
        with open(self.output, "ab") as output:
            self.process = subprocess.Popen(
                [
                    *(*self.prefix, sys.executable, "-m", "syncd", "watch"),
                    *("-C", str(self.layout.root), *self.arguments),
                ],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**environ, **self.environ},
                start_new_session=True,
            )

    @property
    def output(self) -> Path:
        """What the daemon printed."""
        return self.layout.root.with_suffix(".log")

    def kill(self) -> None:
        """SIGKILL the daemon."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def stop(self) -> int:
        """Ask the daemon to end; return its exit code."""
        assert self.process is not None
        self.process.terminate()
        code = self.process.wait(60)
        self.process = None
        return code

    def wait(self, seconds: float = PATIENCE) -> int:
        """Wait until the daemon has ended by itself; return its exit code."""
        assert self.process is not None
        code = self.process.wait(seconds)
        self.process = None
        return code


class Ends:
    """A laptop, a VM, and a remote between them."""

    def __init__(self, folder: Path, remote: str, *, rclone_config: str = "") -> None:
        self.folder = folder
        self.remote = remote
        self.rclone_config = rclone_config
        self.laptop = End(Layout(folder / "laptop"))
        self.vms: list[End] = []
        initialise(
            self.laptop.layout, role=Role.CONTROLLER, remote=remote, rclone_config=rclone_config
        )

    @property
    def vm(self) -> End:
        """The newest VM."""
        return self.vms[-1]

    def new_vm(self) -> End:
        """A machine with an empty disk, its daemon not started yet."""
        end = End(Layout(self.folder / f"vm{len(self.vms) + 1}"))
        initialise(
            end.layout,
            role=Role.WORKER,
            remote=self.remote,
            key_file=self.laptop.layout.key,
            rclone_config=self.rclone_config,
        )
        self.vms.append(end)
        return end

    def lose_vm(self) -> None:
        """Take the VM away as its provider does: every process at once, and the disk."""
        vm = self.vm
        vm.kill()
        for pid in processes_of(vm.layout):
            os.kill(pid, signal.SIGKILL)
        eventually(lambda: not list(processes_of(vm.layout)), what="the VM's processes live on")
        shutil.rmtree(vm.layout.root)

    def serve(self, **files: str) -> None:
        """Write files of the payload; `stages` is stages.toml, `a_sh` is a.sh."""
        for name, text in files.items():
            path = "stages.toml" if name == "stages" else name.replace("_", ".")
            (self.laptop.layout.serve / path).write_text(text)

    def append(self, *lines: str) -> None:
        """Append lines to the laptop's queue, as a person would."""
        with open(self.laptop.layout.queue, "a", encoding="utf-8") as queue:
            queue.write("".join(f"{line}\n" for line in lines))

    def sh(self, script: str) -> str:
        """Append a shell command; return its line."""
        line = encode_script(script)
        self.append(line)
        return line

    def journal(self) -> dict[int, JournalRecord]:
        """Every command's newest record, as the laptop has it."""
        path = self.laptop.layout.journal
        return fold(parse_journal(path.read_bytes())[0]) if path.exists() else {}

    def records(self) -> Sequence[JournalRecord]:
        """Every record that the laptop has, in order."""
        records, problems = parse_journal(self.laptop.layout.journal.read_bytes())
        assert not problems
        return records

    def ended(self, number: int, seconds: float = PATIENCE) -> JournalRecord:
        """Wait until a command has ended, as the laptop has it; return its record."""

        def find() -> JournalRecord | None:
            record = self.journal().get(number)
            return record if record and record.state is State.ENDED else None

        return eventually(find, within=seconds, what=lambda: self.told(number))

    def started(self, number: int, seconds: float = PATIENCE) -> None:
        """Wait until a command has started, as the laptop has it."""

        def find() -> bool:
            record = self.journal().get(number)
            return record is not None and record.state in (State.STARTED, State.ENDED)

        eventually(find, within=seconds, what=lambda: self.told(number))

    def told(self, number: int) -> str:
        """What to say when command `number` does not come about."""
        ends = [self.laptop, *self.vms]
        outputs = [end.output.read_text()[-3000:] for end in ends if end.output.exists()]
        return f"command {number} did not come about\n" + "\n---\n".join(outputs)

    def log(self, name: str) -> bytes:
        """A log as the laptop has it; empty when there is none."""
        path = self.laptop.layout.inbox / f"{name}.log"
        return path.read_bytes() if path.exists() else b""

    def results(self) -> Results:
        return Results.load(self.laptop.layout.results)

    def status(self) -> dict[str, Any]:
        """The worker's status as the laptop has it, as JSON; empty when there is none."""
        path = self.laptop.layout.private / "status.json"
        return dict(json.loads(path.read_bytes())) if path.exists() else {}

    def close(self) -> None:
        self.laptop.kill()
        for vm in self.vms:
            vm.kill()
            for pid in processes_of(vm.layout):
                os.kill(pid, signal.SIGKILL)


def processes_of(layout: Layout) -> Iterator[int]:
    """Yield the process ids that belong to an end: its supervisors and their stages."""
    mark = f"SYNCD_SUPERVISED={layout.runs}/".encode()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        try:
            environ = (entry / "environ").read_bytes()
            command = (entry / "cmdline").read_bytes()
        except OSError:
            continue
        supervisor = b"syncd.stages.supervisor" in command and str(layout.runs).encode() in command
        if supervisor or mark in environ:
            yield int(entry.name)
