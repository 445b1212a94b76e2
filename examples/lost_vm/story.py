"""A VM that dies at epoch 11, and a run that goes on: the whole story, on three hosts of this one.

    sudo .venv/bin/python examples/lost_vm/story.py [--short]

In network namespaces: a laptop with `syncd watch`, a drive (`rclone serve webdav`), and a VM whose
Jupyter runs the one cell of `syncd bootstrap`. Pretraining starts; the laptop goes away for some
epochs; the VM is destroyed, processes, network and disk, at epoch 11, when the checkpoint of epoch
10 is safe. A new VM runs the same cell. What comes out must be, bit for bit, what comes out of a
run that nobody disturbed. Needs root, Linux, iproute2, and the extras `demo` and `test`, which
`make test` installs; --short leaves out what follows pretraining.
"""

# ruff: noqa: E402 (the tests' helpers are no package)
from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
from safetensors.numpy import load_file

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "support"))  # machines, networks and Jupyter's API

from netns import Network, NetworkWebdav
from notebooks import JupyterServer, Kernel, Laptop, Machine
from waiting import eventually

from protocol.checkpoints import CheckpointIndex
from protocol.errors import ConfigError, ExitCode, RunFailedError, UserError
from protocol.paths import Layout
from protocol.progress import Progress, read_progress
from protocol.results import Results, RunRecord
from protocol.schema import decode, loads
from syncd.watching import ended_by_sigterm

AWAY_AT, BACK_AT, DIES_AT = 2, 9, 11
EPOCHS = {True: 14, False: 20}
CLIPS = {True: 500, False: 2000}
STAGES = ("pretrain", "finetune", "export", "gate")
PATIENCE = 300.0
_EPOCH = re.compile(r"epoch (\d+) of")
_RESUMED = re.compile(r"resumed from step (\d+) of (\d+)")


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How it went.

    `seconds` is from the moment at which all was installed on the second VM to the first step of
    the resumed run; `weights` are digests of the encoder, of this run and of one undisturbed.
    """

    resumed_from_epoch: float
    attempts: int
    seconds: float
    weights: tuple[str, str]
    results: dict[str, str]


class Story:
    """The three hosts, and what happens to them, in order."""

    def __init__(self, folder: Path, network: Network, *, short: bool) -> None:
        self.folder = folder
        self.network = network
        self.short = short
        self.drive = NetworkWebdav(folder / "drive", network, on_laptop=False)
        self.drive.start()
        config = folder / "rclone.conf"
        config.write_text(self.drive.section("drive"))
        config.chmod(0o600)
        self.laptop = Laptop(folder, remote=self.drive.fs("drive"), rclone_config=str(config))
        self.laptop.end.prefix = network.laptop.prefix

    def close(self) -> None:
        self.laptop.close()
        self.drive.kill()

    def prepare(self) -> str:
        """Fill serve/, start the laptop's daemon, and return the cell."""
        serve = self.laptop.layout.serve
        for name in ("stages.toml", "trainer.toml"):
            text = (ROOT / "examples" / "demo" / name).read_text()
            text = text.replace("epochs = 20", f"epochs = {EPOCHS[self.short]}", 1)
            # Small steps, so that an epoch takes a while.
            text = text.replace("[pretrain]", "[pretrain]\nbatch_size = 4")
            (serve / name).write_text(text)
        say("building the pool that the laptop serves")
        pool, index = str(serve / "pool"), str(serve / "index.json")
        clips = str(CLIPS[self.short])
        _trainer("pool", "build", "--output", pool)
        _trainer("pool", "sample", pool, "--size", clips, "--seed", "0", "--output", index)
        say("starting the laptop's daemon, and making the cell")
        self.laptop.end.start()
        return str(self.laptop.bootstrap()["cell"])

    @contextmanager
    def vm(self, name: str, cell: str) -> Iterator[tuple[Layout, Kernel]]:
        """A fresh VM whose notebook runs the cell. It is destroyed when the block ends."""
        say(f"making {name}, and running the cell on it")
        machine = Machine(self.folder / name)
        (machine.home / ".syncd-key").write_text(self.laptop.key())
        try:
            with (
                JupyterServer(machine, host=self.network.vm) as server,
                closing(Kernel(server)) as kernel,
            ):
                kernel.run(cell)
                yield Layout(machine.home / "syncd"), kernel
                machine.kill_all()
        finally:
            machine.kill_all()
            shutil.rmtree(machine.folder)

    def first_vm(self, cell: str) -> None:
        """Pretraining starts, and is cut off with the VM."""
        with self.vm("vm1", cell) as (layout, kernel):
            kernel.until("running", within=PATIENCE)
            say(f"the first VM is the worker; pretraining goes on to epoch {AWAY_AT}")
            self.append(*STAGES[:1] if self.short else STAGES)
            self.until_epoch(layout, kernel, AWAY_AT)
            self.network.unplug(self.network.laptop)
            say("the laptop is away")
            self.until_epoch(layout, kernel, BACK_AT)
            self.network.plug_in(self.network.laptop)
            say("the laptop is back")
            self.until_epoch(layout, kernel, DIES_AT)
            # So that it does not depend on how fast this machine is.
            held = _hold(layout)
            eventually(lambda: self.is_safe(layout), within=PATIENCE, what=lambda: kernel.text)
            say(f"the VM dies at epoch {DIES_AT}; process {held} of its run with it")
        self.network.renew_vm()

    def second_vm(self, cell: str) -> Outcome:
        """The same cell on a new VM; the rest of the queue follows."""
        with self.vm("vm2", cell) as (layout, kernel):
            kernel.until("is installed", within=PATIENCE)
            installed = time.monotonic()
            log = layout.log("pretrain")
            found = eventually(lambda: _resumed(log), within=PATIENCE, what=lambda: kernel.text)
            eventually(
                lambda: _step(layout) > int(found[1]), within=PATIENCE, what=lambda: kernel.text
            )
            seconds = time.monotonic() - installed
            say(f"the second VM resumed from step {found[1]} after {seconds:.1f} s")
            runs = eventually(self.ended, within=3 * PATIENCE, what=lambda: kernel.text)
        pretrain = next(run for run in runs if run.stage == "pretrain")
        epoch = int(found[1]) / int(found[2]) * EPOCHS[self.short]
        return Outcome(
            resumed_from_epoch=epoch,
            attempts=pretrain.attempts,
            seconds=seconds,
            weights=(_digest(self.arrived(pretrain)), _digest(self.undisturbed())),
            results={run.stage: str(run.result) for run in runs},
        )

    def append(self, *stages: str) -> None:
        with open(self.laptop.layout.queue, "a") as queue:
            queue.writelines(f"run:{stage}\n" for stage in stages)

    def until_epoch(self, layout: Layout, kernel: Kernel, epoch: int) -> None:
        """Wait until the VM's run is at this epoch."""
        eventually(lambda: _epoch(layout) >= epoch, within=PATIENCE, what=lambda: kernel.text)

    def is_safe(self, layout: Layout) -> bool:
        """Whether the checkpoint of epoch 10 is said to be safe."""
        if not layout.checkpoint_index.exists():
            return False
        index = decode(CheckpointIndex, loads(layout.checkpoint_index.read_bytes()))
        files = [file for each in index.runs.values() for file in each]
        steps = sorted({Path(file.path).stem for file in files})
        return len(steps) >= 2 and all(f.safe for f in files if Path(f.path).stem == steps[1])

    def ended(self) -> list[RunRecord]:
        """Every run's result at the laptop, once all have ended; empty before."""
        wanted = STAGES[:1] if self.short else STAGES
        runs = list(Results.load(self.laptop.layout.results).runs.values())
        return runs if {run.stage for run in runs} >= set(wanted) else []

    def arrived(self, run: RunRecord) -> Path:
        path = self.laptop.layout.artifacts / run.run_id / "encoder.safetensors"
        eventually(path.exists, within=PATIENCE)
        return path

    def undisturbed(self) -> Path:
        """The encoder of the same run, by hand, which nobody disturbs."""
        say("running the same pretraining undisturbed, to compare")
        serve, output = self.laptop.layout.serve, self.folder / "undisturbed"
        _trainer("--config", "trainer.toml", "pretrain", "--output", str(output), cwd=serve)
        return next(output.glob("artifacts/*/encoder.safetensors"))


def tell(folder: Path, *, short: bool) -> Outcome:
    """Have it all happen, in `folder`."""
    say("making three hosts, in network namespaces of this one")
    with ExitStack() as stack:
        network = stack.enter_context(Network())
        story = Story(folder, network, short=short)
        stack.callback(story.close)
        cell = story.prepare()
        story.first_vm(cell)
        return story.second_vm(cell)


def _progress(layout: Layout) -> Progress | None:
    """How far the VM's only run is, as it said last: the status tells it later."""
    found = next(layout.runs.glob("pretrain.*/progress.json"), None)
    return read_progress(found) if found else None


def _epoch(layout: Layout) -> int:
    progress = _progress(layout)
    found = _EPOCH.search(progress.message) if progress else None
    return int(found[1]) if found else 0


def _step(layout: Layout) -> float:
    progress = _progress(layout)
    return progress.step if progress else 0.0


def _resumed(log: Path) -> re.Match[str] | None:
    return _RESUMED.search(log.read_text()) if log.exists() else None


def _hold(layout: Layout) -> int:
    """Stop the trainer where it is, so that it comes no further; return its process id."""
    for process in psutil.process_iter(["cmdline", "environ"]):
        environ = process.info["environ"] or {}
        ours = environ.get("SYNCD_STORE") == str(layout.store)
        if ours and "trainer" in (process.info["cmdline"] or ()):
            process.suspend()
            return int(process.pid)
    raise AssertionError("the run has ended")


def _digest(path: Path) -> str:
    """Return the SHA-256 of a file's tensors, names and bits; its metadata has the run's id."""
    digest = hashlib.sha256()
    for name, tensor in sorted(load_file(path).items()):
        digest.update(f"{name} {tensor.dtype} {tensor.shape}".encode() + tensor.tobytes())
    return digest.hexdigest()


def _trainer(*arguments: str, cwd: Path | None = None) -> None:
    """Run the trainer's command line. Raises RunFailedError with what it has said."""
    command = [sys.executable, "-P", "-m", "trainer", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=cwd, check=False)
    if done.returncode:
        why = f"it ended with {done.returncode}: {done.stderr.strip()[-2000:]}"
        raise RunFailedError(f"run {shlex.join(command)}", why=why)


def _check_machine() -> None:
    """Raise ConfigError where the hosts cannot be made."""
    if sys.platform != "linux" or os.geteuid() != 0 or not shutil.which("ip"):
        why = "it takes Linux, root, and `ip` (iproute2)"
        raise ConfigError("make hosts in network namespaces", why=why, hint="Run it with sudo.")


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')}  {text}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--short", action="store_true", help="pretraining alone, on fewer clips")
    arguments = parser.parse_args()
    try:
        _check_machine()
        with ended_by_sigterm(), tempfile.TemporaryDirectory(prefix="lost-vm-") as folder:
            outcome = tell(Path(folder), short=arguments.short)
    except UserError as error:
        print(f"story.py: error: {error}", file=sys.stderr)
        return int(error.exit_code)
    except KeyboardInterrupt:
        return int(ExitCode.INTERRUPTED)  # all that was made is gone again
    print(json.dumps(outcome.__dict__, indent=1))
    return 0 if outcome.weights[0] == outcome.weights[1] else 1


if __name__ == "__main__":
    sys.exit(main())
