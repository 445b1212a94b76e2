"""Both ends as a state machine, over a remote as bad as a remote may be, and over real ones.

Hypothesis draws what a person, the two machines and the remote do, in any order; once nothing goes
wrong any more, all that was promised must have come true. The daemons are the real ones; of
processes there are stand-ins (`stepping.Attempts`), and the remote is one (`fake_remote`) or real.
"""

from __future__ import annotations

import contextlib
import random
import shutil
import threading
import unittest
from collections import Counter
from pathlib import Path

import pytest
from fake_remote import CrashError, FakeRemote, Faults, Store, Unreliable
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from servers import SERVERS, Server
from stepping import Attempts, Clock, StandingClock, SteppedEnd, fast_folder

from protocol.logs import LogStart, parse_log_line
from protocol.queue import encode_script
from protocol.results import Results
from protocol.states import Result
from protocol.wire import Role
from syncd.bench.slow_link import SlowLink
from syncd.config import Key
from syncd.rclone.rcd import Rclone
from syncd.rclone.remote import RcloneRemote, Remote

STAGES = """
[stages.a]
command = "a"
gpu = 0.5
[stages.b]
command = "b"
after = ["a"]
gpu = 0.5
[stages.again]
command = "again"
retries = 2
gpu = 0.25
"""
LINES = ("run:a", "run:b", "run:again", "stop:a", "stop:again", "run:unknown", "not a command")
QUIET_ROUNDS = 400
ABSENCE = 86400.0


class Model(RuleBasedStateMachine):
    """What may happen to two ends."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = pytest.MonkeyPatch()
        self.clock = self.make_clock()
        self.attempts = Attempts(self.patches)
        self.patches.setattr("syncd.controller.DEBOUNCE_SECONDS", 0.0)
        self.patches.setattr("syncd.daemon._pause", self.pause)
        self.patches.setattr("syncd.worker.FENCE_PATIENCE_SECONDS", 0.0)
        self.patches.setattr("syncd.delivery.link.STATE_PACKS", 12)
        self.stack = contextlib.ExitStack()
        self.folder = self.stack.enter_context(fast_folder())
        self.lines: list[str] = []
        self.lost_vms = 0
        self.replaced_vms = 0
        self.busy = False
        self.begun = False

    @initialize(seed=st.integers(0, 2**32 - 1))
    def begin(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.draw_secrets()
        self.faults = Faults(self.rng, self.meanwhile)
        self.key = Key.new()
        self.connect()
        self.laptop = SteppedEnd(
            self.folder / "laptop", Role.CONTROLLER, self.remote("laptop"), self.key
        )
        self.laptop.layout.serve.mkdir(parents=True)
        (self.laptop.layout.serve / "stages.toml").write_text(STAGES)
        self.vms: list[SteppedEnd] = []
        self.new_vm()
        self.begun = True

    # What differs between a fake remote and a real one: over a fake one, a history is repeated
    # exactly by what hypothesis drew

    def make_clock(self) -> Clock:
        return StandingClock(self.patches)

    def draw_secrets(self) -> None:
        self.patches.setattr("secrets.token_hex", lambda n: self.rng.randbytes(n).hex())
        self.patches.setattr("secrets.token_bytes", self.rng.randbytes)

    def connect(self) -> None:
        self.store = Store()

    def disconnect(self) -> None:
        return

    def reach(self, who: str) -> Remote:
        return FakeRemote(self.store, self.faults, who)

    def remote(self, who: str) -> Remote:
        return Unreliable(self.reach(who), self.faults, who)

    def settle_remote(self) -> None:
        """Let what is on its way arrive."""
        self.store.settle()

    def objects(self) -> int:
        return self.store.count()

    # The machines

    @property
    def vm(self) -> SteppedEnd:
        """The VM that was not replaced, or the newest of several that do not know it yet."""
        return next((vm for vm in reversed(self.vms) if not vm.fenced), self.vms[-1])

    def new_vm(self) -> None:
        name = f"vm{len(self.vms) + self.lost_vms}"
        self.vms.append(SteppedEnd(self.folder / name, Role.WORKER, self.remote(name), self.key))

    def meanwhile(self, who: str) -> None:
        """What other ends do while one waits for its remote."""
        if self.busy or not self.faults.draw(self.faults.busy):
            return
        self.busy = True
        try:
            for _ in range(self.rng.randrange(1, 6)):
                end = self.rng.choice(self.ends())
                if end.layout.root.name != who:
                    self.do(end, self.rng.choice(list(end.loops())))
        finally:
            self.busy = False

    def ends(self) -> list[SteppedEnd]:
        return [self.laptop, *self.vms] if self.begun else []

    def do(self, end: SteppedEnd, name: str) -> None:
        """A round of an end, started if it does not run; a crash in it is one of its daemon."""
        if end.fenced:
            return
        try:
            end.start()
            end.step(name)
            if end.fenced:
                end.kill()
        except CrashError:
            end.kill()
        except Exception:
            if end.daemon is not None:  # else it could not start: as when `syncd watch` ends
                raise

    def pause(self, failures: int, error: Exception) -> float:
        """Take the place of a daemon's pause after an error."""
        self.clock.advance(1.0)
        return 0.0

    # What a person does

    @rule(line=st.sampled_from(LINES))
    def append(self, line: str) -> None:
        self.lines.append(line)
        with open(self.laptop.layout.queue, "a", encoding="utf-8") as queue:
            queue.write(f"{line}\n")

    @rule()
    def append_shell(self) -> None:
        self.append(encode_script(f"echo {len(self.lines)}"))

    @rule(word=st.sampled_from(["x", "y", "z"]), size=st.sampled_from([1, 70_000]))
    def edit_serve(self, word: str, size: int) -> None:
        (self.laptop.layout.serve / f"{word}.txt").write_bytes(word.encode() * size)

    # What the machines do

    @rule(name=st.sampled_from(["pull", "main", "bulk", "push", "serve"]))
    def laptop_round(self, name: str) -> None:
        self.do(self.laptop, name)

    @rule(name=st.sampled_from(["pull", "main", "bulk", "push"]), old=st.booleans())
    def vm_round(self, name: str, old: bool) -> None:
        self.do(self.vms[0 if old else -1], name)

    @rule()
    def all_rounds(self) -> None:
        for end in self.ends():
            for name in end.loops():
                self.do(end, name)

    @rule(rounds=st.integers(5, 40), seconds=st.sampled_from([0.0, 0.3, 3.0]))
    def some_rounds(self, rounds: int, seconds: float) -> None:
        """Rounds of any loops of any ends, in any order."""
        for _ in range(rounds):
            end = self.rng.choice(self.ends())
            self.do(end, self.rng.choice(list(end.loops())))
            self.clock.advance(seconds)

    @rule(seconds=st.sampled_from([0.3, 2.0, 6.0, 60.0]))
    def wait(self, seconds: float) -> None:
        self.clock.advance(seconds)

    @rule(code=st.sampled_from([0, 0, 0, 3]), artefact=st.booleans())
    @precondition(lambda self: self.attempts.alive)
    def attempt_ends(self, code: int, artefact: bool) -> None:
        folder = self.rng.choice(sorted(self.attempts.alive))
        if artefact:
            self.make_artefact(folder)
        self.attempts.finish(folder, code)

    @rule(count=st.integers(1, 400))
    @precondition(lambda self: self.attempts.alive)
    def attempt_writes(self, count: int) -> None:
        folder = self.rng.choice(sorted(self.attempts.alive))
        self.attempts.write(folder, f"{folder.parent.name} {'x' * count}\n".encode())

    def make_artefact(self, folder: Path) -> None:
        run_id = folder.parent.name
        made = folder.parents[3] / "in" / "artifacts" / run_id
        made.mkdir(parents=True, exist_ok=True)
        (made / "small.txt").write_text(f"made by {run_id} {folder.name}")
        (made / "large.bin").write_bytes(run_id.encode() * 5000)

    # What goes wrong

    @rule(
        error=st.sampled_from([0.0, 0.1, 0.4]),
        torn=st.sampled_from([0.0, 0.2]),
        doubled=st.sampled_from([0.0, 0.3]),
        late=st.sampled_from([0.0, 0.5]),
        crash=st.sampled_from([0.0, 0.05]),
        busy=st.sampled_from([0.0, 0.3]),
    )
    def weather(
        self, error: float, torn: float, doubled: float, late: float, crash: float, busy: float
    ) -> None:
        self.faults.error, self.faults.torn, self.faults.doubled = error, torn, doubled
        self.faults.crash, self.faults.busy, self.faults.sizeless = crash, busy, 0.1
        # Two workers at once are told apart by what each of them sees after it has written.
        self.faults.late = 0.0 if self.replaced_vms else late

    @rule()
    def remote_settles(self) -> None:
        self.settle_remote()

    @rule(which=st.sampled_from(["laptop", "vm", "both"]))
    def kill(self, which: str) -> None:
        for name, end in (("laptop", self.laptop), ("vm", self.vm)):
            if which in (name, "both"):
                end.kill()

    @rule()
    @precondition(lambda self: self.lost_vms < 3)
    def lose_vm(self) -> None:
        """The VM goes, disk and all; the next one comes after the remote's delays."""
        vm = self.vms.pop(self.vms.index(self.vm))
        vm.kill()
        self.attempts.vanish(vm.layout.root)
        shutil.rmtree(vm.layout.root)
        self.lost_vms += 1
        self.settle_remote()
        self.new_vm()

    @rule()
    @precondition(lambda self: self.replaced_vms < 2)
    def replace_vm(self) -> None:
        """Another VM is started while the old one lives."""
        self.replaced_vms += 1
        self.faults.late = 0.0
        self.settle_remote()
        self.new_vm()

    # What must have come true

    def teardown(self) -> None:
        try:
            if self.begun:
                self.check()
        finally:
            for end in self.ends():
                end.kill()
            if self.begun:
                self.disconnect()
            self.patches.undo()
            self.stack.close()

    def check(self) -> None:
        self.faults.heal()
        self.settle_remote()
        self.quiet_down()
        self.check_commands()
        self.check_files()

    def quiet_down(self) -> None:
        """Go on, with nothing going wrong, until all is said and done."""
        for _ in range(QUIET_ROUNDS):
            self.clock.advance(3.0)
            self.all_rounds()
            for folder in list(self.attempts.alive):
                self.attempts.finish(folder)
            if self.is_quiet():
                return
        raise AssertionError(f"not quiet: {self.laptop.journal()} {self.laptop.daemon.problems}")  # type: ignore[union-attr]

    def is_quiet(self) -> bool:
        journal = self.laptop.journal()
        done = len(journal) == len(self.lines) and not self.laptop.open_commands()
        worker, controller = self.vm.daemon, self.laptop.daemon
        assert worker is not None
        assert controller is not None
        if sum(not vm.fenced for vm in self.vms) > 1:
            return False
        sent = not worker.outgoing.unsent() and not worker.outgoing.held()  # type: ignore[attr-defined]
        logs = all(
            self.log(self.laptop, path.name) == path.read_bytes()
            for path in self.vm.layout.inbox.glob("*.log")
            if self.is_first_vm
        )
        files = not controller.files.missing()  # type: ignore[attr-defined]
        few = self.objects() < 200  # after a compaction, where much was said meanwhile
        return done and sent and logs and files and few

    @property
    def is_first_vm(self) -> bool:
        """Whether there was one VM only, so that the laptop's logs are its logs."""
        return not self.lost_vms + self.replaced_vms

    @staticmethod
    def log(end: SteppedEnd, name: str) -> bytes:
        path = end.layout.inbox / name
        return path.read_bytes() if path.exists() else b""

    def check_commands(self) -> None:
        journal = self.laptop.journal()
        assert [journal[n].line for n in sorted(journal)] == self.lines
        assert journal == self.vm.journal()
        assert not self.attempts.doubled
        runs = Results.load(self.laptop.layout.results).runs
        results = {run_id: run.result for run_id, run in runs.items()}
        for number, record in journal.items():
            spawned, ended = self.attempts.spawned[record.run_id], self.attempts.ended
            if record.line.startswith("sh:"):
                assert spawned <= 1, f"{number} ran {spawned} times"
                assert not self.is_first_vm or record.result in (Result.SUCCESS, Result.FAILED)
            if record.result is Result.SUCCESS and record.run_id:
                assert any(r.result is Result.SUCCESS for r in ended[record.run_id])
            if record.attempt and record.result is not Result.LOST:
                assert results[record.run_id] is record.result
        keys = Counter(record.key for record in self.laptop.records())
        assert max(keys.values(), default=1) == 1

    def check_files(self) -> None:
        for path in self.vm.layout.inbox.glob("*.log"):
            there, here = path.read_bytes(), self.log(self.laptop, path.name)
            if self.is_first_vm:
                assert here == there
            starts = [parse_log_line(line) for line in here.splitlines()]
            begun = [(s.run_id, s.attempt) for s in starts if isinstance(s, LogStart)]
            assert len(begun) == len(set(begun))
        artefacts = self.vm.layout.artifacts
        for path in artefacts.rglob("*") if artefacts.exists() else ():
            if path.is_file():
                copy = self.laptop.layout.artifacts / path.relative_to(artefacts)
                assert copy.read_bytes() == path.read_bytes()


def machine(model: type[Model], *, examples: int, steps: int) -> type[unittest.TestCase]:
    """Return the test of a model. What it draws is random: a failure prints how to repeat it."""
    case: type[unittest.TestCase] = model.TestCase
    case.settings = settings(  # type: ignore[attr-defined]
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        print_blob=True,
        suppress_health_check=list(HealthCheck),
    )
    return pytest.mark.timeout(1800)(case)


class RealModel(Model):
    """The same over a real server, that rclone reaches; it is as good as its server is."""

    server_class: type[Server]

    def make_clock(self) -> Clock:
        return Clock(self.patches)

    def draw_secrets(self) -> None:
        return

    def connect(self) -> None:
        self.server = self.server_class(self.folder / "server")
        self.server.start()
        config = self.folder / "rclone.conf"
        config.write_text(self.server.section("there"))
        self.rclone = Rclone(self.folder / "rclone", config=config)
        self.rclone.start()

    def disconnect(self) -> None:
        self.rclone.close()
        self.server.kill()

    def reach(self, who: str) -> Remote:
        return RcloneRemote(self.rclone, self.server.fs("there"))

    def settle_remote(self) -> None:
        return

    def objects(self) -> int:
        return sum(path.is_file() for path in self.server.root.rglob("*-pack-*"))


class LongModel(Model):
    """The same, for longer."""


class BadLinkModel(RealModel):
    """The same by a link that breaks at any byte, stands still, and is not there at all."""

    def connect(self) -> None:
        self.server = self.server_class(self.folder / "server")
        self.server.start()
        self.link = self.stack.enter_context(SlowLink(self.server.port))
        config = self.folder / "rclone.conf"
        section = self.server.section("there")
        config.write_text(section.replace(str(self.server.port), str(self.link.port)))
        self.rclone = Rclone(self.folder / "rclone", config=config)
        self.rclone.start()

    # rclone itself tries a call three times.
    @rule(size=st.integers(0, 5000), down=st.booleans(), times=st.integers(1, 8))
    def cut(self, size: int, down: bool, times: int) -> None:
        self.link.cut_after(size, down=down, times=times)

    @rule()
    def reset(self) -> None:
        self.link.reset_all()

    @rule()
    def refuse(self) -> None:
        self.link.refuse()

    @rule()
    def accept(self) -> None:
        self.link.accept()

    @rule(seconds=st.floats(0.0, 0.5))
    def stall(self, seconds: float) -> None:
        self.link.stall()
        timer = threading.Timer(seconds, self.link.resume)
        self.stack.callback(timer.join)
        timer.start()

    def settle_remote(self) -> None:
        self.link.accept()
        for down in (False, True):
            self.link.cut_after(0, down=down, times=0)


class WebdavModel(RealModel):
    server_class = SERVERS["webdav"]


class SftpModel(RealModel):
    server_class = SERVERS["sftp"]


class S3Model(RealModel):
    server_class = SERVERS["s3"]


class WebdavBadLinkModel(BadLinkModel):
    server_class = SERVERS["webdav"]


class SftpBadLinkModel(BadLinkModel):
    server_class = SERVERS["sftp"]


class S3BadLinkModel(BadLinkModel):
    server_class = SERVERS["s3"]


class OpenSshBadLinkModel(BadLinkModel):
    server_class = SERVERS["openssh"]


TestFake = machine(Model, examples=25, steps=40)
TestFakeForLong = pytest.mark.long(machine(LongModel, examples=400, steps=60))
TestWebdav = machine(WebdavModel, examples=2, steps=25)
TestSftp = machine(SftpModel, examples=2, steps=25)
TestS3 = machine(S3Model, examples=2, steps=25)
TestWebdavByABadLink = machine(WebdavBadLinkModel, examples=3, steps=25)
TestSftpByABadLink = pytest.mark.long(machine(SftpBadLinkModel, examples=4, steps=30))
TestS3ByABadLink = pytest.mark.long(machine(S3BadLinkModel, examples=4, steps=30))
TestOpenSshByABadLink = pytest.mark.long(machine(OpenSshBadLinkModel, examples=4, steps=30))
