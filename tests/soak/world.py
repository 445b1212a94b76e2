"""The world of one episode: a laptop, its VMs, a remote between them, and who ends whom.

Every process in it is real: the daemons are forks of this one, which has imported syncd already,
and run the very command `syncd watch`; rclone, supervisors and stages are theirs.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import random
import shutil
import signal
import sqlite3
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import crashpoints
import faults
from ends import processes_of
from person import Person
from servers import SERVERS, WebdavServer
from waiting import eventually

import protocol.queue
import syncd.cli
import syncd.controller
import syncd.daemon
import syncd.delivery.files
import syncd.delivery.link
import syncd.delivery.takes
import syncd.show
import syncd.stages.schedule
import syncd.worker
from protocol.errors import ExitCode
from protocol.paths import Layout
from protocol.wire import Role
from syncd.platform import Identity
from syncd.setup import initialise

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # <linux/prctl.h>
ROOT = Path(__file__).parents[2]
FAILED_PAUSE = 0.5  # before a daemon is started again that ended by itself, and was not to
# Waits that only cost time here: code and order of steps stay as they are.
HASTE = {
    syncd.daemon: {
        "DISCOVER_SECONDS": 0.3,
        "MAX_PAUSE_SECONDS": 0.3,
        "UNREACHABLE_PAUSE_SECONDS": 0.3,
        "RESCAN_SECONDS": 2.0,
    },
    syncd.delivery.link: {"ACK_SECONDS": 0.05},
    syncd.delivery.files: {"SETTLE_SECONDS": 0.2},
    syncd.delivery.takes: {"SETTLE_SECONDS": 0.2},
    syncd.controller: {"DEBOUNCE_SECONDS": 0.05, "SERVE_SCAN_SECONDS": 2.0, "TICK_SECONDS": 0.5},
    syncd.worker: {"IDLE_TICK_SECONDS": 0.5},
    protocol.queue: {"SETTLE_SECONDS": 0.5},
    syncd.stages.schedule: {"MAX_BACKOFF_SECONDS": 0.2},
}


class End:
    """One end and its daemon, which is started again whenever it is dead, after a pause."""

    def __init__(self, role: Role, root: Path) -> None:
        self.role = role
        self.layout = Layout(root)
        self.output = root.with_suffix(".log")
        self.pid = 0
        self.due = 0.0  # when to start it, should it be dead
        self.wanted = True  # whether it is to be started again
        self.replaced = False  # another one has been put in its place: it may find itself fenced


class World:
    """Both ends. `tick` it often; it must be the only child-waiting part of its process."""

    def __init__(self, folder: Path, remote: str, *, state_packs: int, fault: str = "") -> None:
        self.folder = folder
        self._state_packs, self._fault = state_packs, fault
        self.control = folder / "control"
        self.witness = folder / "witness"
        for path in (self.control / "shots", self.witness / "locks", folder / "remote"):
            path.mkdir(parents=True)
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self.hits: Counter[str] = Counter()
        self.ended_by_itself: list[str] = []
        self.arrived: dict[tuple[str, str], int] = {}
        self._killed: set[int] = set()
        self._read_kills = 0
        self._server: WebdavServer | None = None
        self._remote, self._config = str(folder / "remote"), ""
        if remote in SERVERS:
            self._serve_remote(remote)
        self.laptop = End(Role.CONTROLLER, folder / "laptop")
        initialise(
            self.laptop.layout,
            role=Role.CONTROLLER,
            remote=self._remote,
            rclone_config=self._config,
        )
        self.vms: list[End] = []
        self.person = Person(self.laptop.layout, self.witness)
        self.new_vm()

    def _serve_remote(self, kind: str) -> None:
        self._server = SERVERS[kind](self.folder / "remote")
        self._server.start()
        config = self.folder / "rclone.conf"
        config.write_text(self._server.section("there"))
        self._remote, self._config = "there:", str(config)

    @property
    def vm(self) -> End:
        """The newest VM."""
        return self.vms[-1]

    @property
    def ends(self) -> list[End]:
        return [self.laptop, *self.vms]

    def new_vm(self) -> End:
        """A machine with an empty disk."""
        end = End(Role.WORKER, self.folder / f"vm{len(self.vms) + 1}")
        initialise(
            end.layout,
            role=Role.WORKER,
            remote=self._remote,
            key_file=self.laptop.layout.key,
            rclone_config=self._config,
        )
        self.vms.append(end)
        return end

    # Life and death

    def start(self, end: End) -> None:
        """Start an end's daemon."""
        end.pid = os.fork()
        if end.pid == 0:
            try:
                code = self._watch(end)
            except BaseException:
                sys.excepthook(*sys.exc_info())
                code = 1
            finally:
                sys.stderr.flush()
                os._exit(code)

    def _watch(self, end: End) -> int:
        """In a fork: become the daemon of an end; return its exit code."""
        os.setsid()
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        output = os.open(end.output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        for fd in (1, 2):
            os.dup2(output, fd)
        # Supervisors are to be of this very checkout, and get their crash points.
        path = [str(Path(crashpoints.__file__).parent), str(ROOT)]
        os.environ["PYTHONPATH"] = os.pathsep.join(path)
        os.environ["CRASH_CONTROL"] = str(self.control)
        for module, constants in HASTE.items():
            for name, value in constants.items():
                assert hasattr(module, name), name
                setattr(module, name, value)
        crashpoints.install_in_daemon(end.role, str(self.control))
        syncd.delivery.link.STATE_PACKS = self._state_packs
        if self._fault:
            faults.FAULTS[self._fault]()
        return syncd.cli.main(["watch", "--folder", str(end.layout.root)])

    def tick(self, pause: float) -> None:
        """Collect the dead, and start daemons that are due; one found dead is, after `pause`."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                pid = 0
            if pid == 0:
                break
            for end in self.ends:
                if end.pid == pid:
                    end.pid, end.due = 0, time.monotonic() + pause
                    self._note_end(end, os.waitstatus_to_exitcode(status))
        for end in self.ends:
            if end.wanted and not end.pid and time.monotonic() >= end.due:
                self.start(end)

    def _note_end(self, end: End, code: int) -> None:
        if end.replaced and code == ExitCode.REFUSED:
            end.wanted = False
        elif code == 0 and not end.wanted:
            return
        elif code != -signal.SIGKILL:
            end.due += FAILED_PAUSE
            self.ended_by_itself.append(f"{end.layout.root.name}: exit {code}")

    def kills(self) -> list[tuple[str, str]]:
        """The shots that have fired since the last call, each with its point."""
        try:
            lines = (self.control / "kills").read_text().splitlines()
        except FileNotFoundError:
            return []
        new = [line.split(" ") for line in lines[self._read_kills :]]
        self._read_kills = len(lines)
        for _, _, _, folder in new:
            if folder:
                self.hits[Path(folder).parent.name] += 1
        return [(shot, point) for shot, point, _, _ in new]

    def points(self) -> list[str]:
        """Every point that was met."""
        path = self.control / "points"
        return sorted(set(path.read_text().split())) if path.exists() else []

    def arm(self, number: int, point: str, times: int) -> str:
        """Have a process die at a point; return the shot's name."""
        name = f"{number}={point}={times}"
        (self.control / "shots" / name).touch()
        return name

    def disarm(self, shot: str) -> None:
        (self.control / "shots" / shot).unlink(missing_ok=True)

    def kill(self, target: str, rng: random.Random) -> bool:
        """SIGKILL a target of a plan; return whether there was one."""
        vm = self.vm
        if target == "both daemons":
            return any([self._kill(self.laptop.pid), self._kill(vm.pid)])
        if target == "all of the VM":
            return self._kill_vm(vm)
        if target in ("controller", "worker"):
            return self._kill((self.laptop if target == "controller" else vm).pid)
        if target.endswith("rclone"):
            end = self.laptop if target.startswith("controller") else vm
            return self._kill(_recorded(end.layout.private / "rclone" / "rclone.pid"))
        return self._kill_attempt(target, vm, rng)

    def _kill_attempt(self, target: str, vm: End, rng: random.Random) -> bool:
        attempts = [p for p in vm.layout.runs.glob("*/attempt-*") if not (p / "exit.json").exists()]
        for folder in rng.sample(sorted(attempts), len(attempts)):
            names = {"supervisor": ["supervisor"], "stage": ["stage"]}
            files = names.get(target, ["supervisor", "stage"])
            killed = [self._kill(_recorded(folder / f"{name}.json")) for name in files]
            if any(killed):
                self.hits[folder.parent.name] += 1
                return True
        return False

    def _kill(self, pid: int) -> bool:
        if not pid:
            return False
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            return False
        return True

    def _kill_vm(self, vm: End) -> bool:
        """SIGKILL every process of a VM, as its provider does."""
        alive = [p.parent.name for p in vm.layout.runs.glob("*/attempt-*") if not _ended(p)]
        self.hits.update(set(alive))
        self._kill(vm.pid)
        while pids := list(processes_of(vm.layout)):
            for pid in pids:
                self._kill(pid)
            self.tick(pause=0.5)
        return True

    def lose_vm(self) -> None:
        """Take the VM away: every process, and the disk. Another one comes."""
        lost = self.vm
        self._note_arrived()
        lost.wanted = False
        self._kill(lost.pid)
        while lost.pid:
            self.tick(pause=0.5)
        self._kill_vm(lost)
        shutil.rmtree(lost.layout.root)
        self.new_vm()

    def suspend_vm(self) -> End:
        """Suspend the VM, and have another one in its place; return the suspended one."""
        old = self.vm
        self._note_arrived()
        for pid in [old.pid, *processes_of(old.layout)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP) if pid else None
        old.replaced = True
        self.new_vm()
        return old

    def vm_has_joined(self) -> bool:
        """Whether the first pack of the newest VM is on the remote."""
        writers = {path.parent for path in (self.folder / "remote").glob("w-*/*")}
        return len(writers) >= len(self.vms)

    def wake(self, end: End) -> None:
        for pid in [end.pid, *processes_of(end.layout)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT) if pid else None

    def _note_arrived(self) -> None:
        """Note which checkpoints the next VM must have: those that the laptop knows to be on the
        remote, and those that the VM has told to be safe there."""
        machine = f"vm{len(self.vms) + 1}"
        for run, file in (*self._known_at_laptop(), *self._told_as_safe()):
            step = int(file.split("-")[1])
            self.arrived[machine, run] = max(step, self.arrived.get((machine, run), 0))

    def _known_at_laptop(self) -> Iterator[tuple[str, str]]:
        path = self.laptop.layout.private / "state.db"
        if not path.exists():
            return
        with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as db:
            query = "SELECT path FROM remote_files WHERE path LIKE 'store/checkpoints/%'"
            try:
                rows = db.execute(query).fetchall()
            except sqlite3.OperationalError:  # it was killed before the state had its tables
                return
        for (name,) in rows:
            run, file = name.split("/")[2:]
            yield run, file

    def _told_as_safe(self) -> Iterator[tuple[str, str]]:
        try:
            index = json.loads(self.vm.layout.checkpoint_index.read_bytes())
        except FileNotFoundError:
            return
        for run, files in index["runs"].items():
            yield from ((run, file["path"]) for file in files if file["safe"] is not None)

    # The end

    def stop(self) -> list[str]:
        """Have every daemon end in peace; return what is still alive afterwards."""
        for end in self.ends:
            end.wanted = False
            if end.pid:
                os.kill(end.pid, signal.SIGTERM)
        eventually(self._all_dead, within=30, what="a daemon does not end")
        return [f"{e.layout.root.name}: {pid}" for e in self.vms for pid in processes_of(e.layout)]

    def _all_dead(self) -> bool:
        self.tick(pause=0.0)
        return not any(end.pid for end in self.ends)

    def close(self) -> None:
        """End every process that is left."""
        for end in self.ends:
            self._kill(end.pid)
            for pid in processes_of(end.layout):
                self._kill(pid)
        if self._server:
            self._server.kill()
        for pid in _children():
            self._kill(pid)


def _recorded(path: Path) -> int:
    """The process id in an identity on file; 0 when that process is not alive."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return 0
    if isinstance(value, list):
        identity = Identity(*value[:3])  # and whose it is
    else:
        identity = Identity(**value.get("identity", value))
    return identity.pid if identity.alive() else 0


def _ended(attempt: Path) -> bool:
    return (attempt / "exit.json").exists()


def _children() -> Iterator[int]:
    yield from map(int, Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())
