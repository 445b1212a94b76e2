"""The supervisor of one attempt of one run: a small detached process.

    python -m syncd.stages.supervisor ATTEMPT_DIR

The daemon spawns it (`syncd.stages.attempt.spawn`), in a session of its own, so that neither a cell
interrupt, nor a kernel restart, nor the daemon's death ends it. It starts the stage, also in a
session of its own and writing straight to its log, waits for its end, a stop request or the
timeout, ends all that descends from the stage, and records how it ended. The files by which it
and the daemon know of each other are described in `syncd.stages.attempt`.

It is a child subreaper (prctl(2), PR_SET_CHILD_SUBREAPER): whatever leaves the stage's process
tree becomes a child of ours. So the kernel's word that we have no child left, ECHILD, is proof
that nothing of the stage is alive.

When an earlier supervisor of the attempt died, and with it the knowledge of how the stage ends,
this one ends what is left (`syncd.stages.orphans`): a command is started at most once an attempt.

Exit code 0: the end is on record. 7: an attempt of the run is alive. 1: a fault; see
`supervisor.log`.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import math
import os
import shlex
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from protocol.errors import DataError, ExitCode
from protocol.logs import LogStart, one_line
from protocol.publish import publish_json
from syncd.platform import Identity
from syncd.stages.attempt_files import (
    EXIT,
    GPU,
    LOCK,
    LOCK_PATIENCE,
    SECRET_VARIABLES,
    STAGE,
    SUPERVISOR,
    TAIL_BYTES,
    AttemptSpec,
    LogFile,
    StageStart,
    fenced_by,
    read_spec,
    stop_reason,
    take_lock,
)
from syncd.stages.causes import Facts, OomKills, StopReason, full_folders
from syncd.stages.exits import record_end, reserve_space
from syncd.stages.gpu_memory import read_gpus
from syncd.stages.log_budget import LogBudget
from syncd.stages.orphans import MARK, any_alive, held_gpu_memory, is_orphaned, take_over
from syncd.stages.process_tree import descendants, end_all

POLL = 0.2
# What ends by itself once the stage has (multiprocessing's resource tracker) is given this long.
SETTLE = 0.5
OOM_SCORE_RISE = 100
_PR_SET_CHILD_SUBREAPER = 36  # <linux/prctl.h>
_AWAITED = frozenset({signal.SIGCHLD, signal.SIGTERM})


def main(argv: Sequence[str]) -> int:
    """Supervise the attempt whose folder is named; return the exit code."""
    folder = Path(os.path.abspath(argv[0]))
    _detach()
    me = Identity.of(os.getpid())
    assert me is not None
    if is_orphaned(folder):
        return take_over(folder, me)
    lock = take_lock(folder.parent / LOCK, patience=LOCK_PATIENCE)
    if lock is None or any_alive(folder.parent):
        return ExitCode.BUSY
    if (folder / EXIT).exists():
        return ExitCode.OK
    if (folder / STAGE).exists():  # another supervisor came and went meanwhile: look again
        return ExitCode.BUSY
    publish_json(folder / SUPERVISOR, dataclasses.asdict(me), mode=0o600)
    reserve_space(folder)
    _supervise(_Tree(folder, me, lock))
    return ExitCode.OK


def _detach() -> None:
    os.chdir("/")
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    # Blocked, the two wait until `sigtimedwait` asks for them: no handler, no race.
    signal.pthread_sigmask(signal.SIG_BLOCK, _AWAITED)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _adopt_strays() -> None:
    """Become the subreaper of all that we start from here on."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"prctl(PR_SET_CHILD_SUBREAPER): {os.strerror(error)}")


def _supervise(tree: _Tree) -> None:
    """Run the attempt and record its end."""
    log, begin = None, 0
    before = OomKills.read()
    try:
        spec = read_spec(tree.folder)
        log = LogFile(Path(spec.log))
        log.line(_opening(spec))
        begin = log.size()
        _note_gpus(tree.folder, spec)
        _adopt_strays()
        stop = stop_reason(tree.folder, spec.fence)
        if stop is None:
            tree.start(spec, log)
    except DataError as error:
        facts = Facts(spawn_error=str(error), started=False)
    except OSError as error:
        facts = Facts(spawn_error=f"prepare to start it: {error}", started=False)
    else:
        if stop is None:
            facts = _watch(tree, spec, log, begin, before)
        else:
            facts = Facts(stop=stop, started=False, fenced_by=fenced_by(spec.fence))
    record_end(tree.folder, facts, log)


def _note_gpus(folder: Path, spec: AttemptSpec) -> None:
    """Note what the GPUs hold before the stage; where one hangs, what asks it is no child of ours.

    So this comes before `_adopt_strays`: a child that cannot die would be one of the stage's.
    """
    use = read_gpus() if spec.gpu else None
    if use is not None:
        publish_json(folder / GPU, dataclasses.asdict(use), mode=0o600)


def _watch(tree: _Tree, spec: AttemptSpec, log: LogFile, begin: int, before: OomKills) -> Facts:
    """See the started stage to the end of its tree; `begin` is where its output does in the log."""
    stop = tree.wait(spec, LogBudget(Path(spec.log), log.fd))
    if stop is None:
        tree.settle(log)
    had_to_kill = tree.end(spec.grace, log)
    error = tree.spawn_error()
    if error:
        return Facts(spawn_error=error, stop=stop, started=False, timeout=spec.timeout)
    kills = OomKills.read().since(before)
    return Facts(
        exit_code=tree.code if tree.code >= 0 else None,
        signal=-tree.code if tree.code < 0 else None,
        stop=stop,
        had_to_kill=had_to_kill,
        timeout=spec.timeout,
        oom_kills=kills.group,
        machine_oom_kills=kills.machine,
        full=full_folders(_folders(spec)),
        tail=log.tail(TAIL_BYTES, begin),
        fenced_by=fenced_by(spec.fence),
        gpu_held=held_gpu_memory(tree.folder),
    )


class _Tree:
    """The stage's process and all that descends from it: all of our children, and theirs."""

    def __init__(self, folder: Path, me: Identity, lock: int) -> None:
        self.folder = folder
        self._me = me
        self._lock = lock
        self._pid = 0
        self._errors = -1
        self._status: int | None = None

    @property
    def code(self) -> int:
        """The exit code of the stage's own process, which has ended; minus the signal's number."""
        assert self._status is not None
        return os.waitstatus_to_exitcode(self._status)

    def start(self, spec: AttemptSpec, log: LogFile) -> None:
        """Start the stage. Raises OSError when its process could not be made or recorded.

        The process exists, and is on record, before the program runs: it waits for a byte from
        us, and ends when we end before sending it.
        """
        environ = _environment(spec, self.folder)
        go_read, go_write = os.pipe()
        self._errors, errors_write = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            os.close(go_write)
            _become_stage(spec, environ, log.fd, self._lock, go_read, errors_write)
        os.close(go_read)
        os.close(errors_write)
        stage = Identity.of(self._pid)
        assert stage is not None  # we have not reaped it
        start = StageStart(identity=stage, time=time.time())
        try:
            publish_json(self.folder / STAGE, dataclasses.asdict(start), mode=0o600)
            os.write(go_write, b"g")
        finally:
            os.close(go_write)

    def spawn_error(self) -> str:
        """Return why the program could not be run, or "". For when the process has ended.

        Not read before: entering a folder on a dead mount takes forever, and can be stopped.
        """
        with open(self._errors, "rb") as errors:
            return errors.read().decode("utf-8", "replace")

    def wait(self, spec: AttemptSpec, budget: LogBudget) -> StopReason | None:
        """Wait for the end of the stage's own process, or for a reason to end it.

        Meanwhile its log is kept within its budget.
        """
        deadline = math.inf if spec.timeout is None else time.monotonic() + spec.timeout
        self._reap()
        while self._status is None:
            left = deadline - time.monotonic()
            if left <= 0:
                return StopReason.TIMED_OUT
            got = signal.sigtimedwait(_AWAITED, min(POLL, left))
            budget.keep()
            stop = stop_reason(self.folder, spec.fence)
            if stop is None and got is not None and got.si_signo == signal.SIGTERM:
                stop = StopReason.TERMINATED
            self._reap()
            if stop is not None and self._status is None:
                return stop
        return None

    def settle(self, log: LogFile) -> None:
        """Give what the stage left a moment to end by itself, and say in the log if it does not."""
        deadline = time.monotonic() + SETTLE
        while (left := self._left()) is not None:
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                pids = ", ".join(str(process.pid) for process in left)
                log.say(f"[syncd] the stage has ended; ending what it left: {pids}\n".encode())
                return
            _pause(remaining)

    def end(self, grace: float, log: LogFile) -> bool:
        """End all that is left, however long it takes; return whether a SIGKILL was needed."""

        def tell(text: str) -> None:
            log.say(f"[syncd] {text}\n".encode())

        return end_all(self._left, grace, _pause, tell)

    def _left(self) -> list[Identity] | None:
        return descendants([self._me]) if self._reap() else None

    def _reap(self) -> bool:
        """Collect the children that have ended; return whether any is left."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if pid == 0:
                return True
            if pid == self._pid:
                self._status = status


def _pause(seconds: float) -> None:
    signal.sigtimedwait({signal.SIGCHLD}, seconds)


def _become_stage(
    spec: AttemptSpec,
    environ: Mapping[str, str],
    log: int,
    lock: int,
    go: int,
    errors: int,
) -> NoReturn:
    """In the child: wait for the byte on `go`, then become the stage's program, or say why not."""
    doing = "prepare its process"
    try:
        os.setsid()
        for sig in (signal.SIGHUP, signal.SIGINT, signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(sig, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.set_inheritable(lock, True)
        _volunteer_for_oom()
        if os.read(go, 1):
            doing = f"enter its folder {spec.cwd}"
            os.chdir(spec.cwd)
            doing = f"run {spec.argv[0]}"
            os.execvpe(spec.argv[0], spec.argv, environ)
    except Exception as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        os.write(errors, f"cannot {doing}: {why}".encode())
    finally:
        os._exit(127)


def _volunteer_for_oom() -> None:
    # When memory runs out the stage should go, not the one who can tell of it.
    with contextlib.suppress(OSError):  # not permitted in some sandboxes
        path = Path("/proc/self/oom_score_adj")
        path.write_text(str(min(int(path.read_text()) + OOM_SCORE_RISE, 1000)))


def _environment(spec: AttemptSpec, folder: Path) -> dict[str, str]:
    mine = {"PYTHONUNBUFFERED": "1", **spec.environ, os.fsdecode(MARK): str(folder)}
    return {k: v for k, v in {**os.environ, **mine}.items() if k not in SECRET_VARIABLES}


def _opening(spec: AttemptSpec) -> bytes:
    """Return what opens the attempt's part of the log."""
    before = f"{spec.run_id} attempt {spec.attempt - 1}"
    cut_off = f"[syncd] {before} was cut off: {one_line(spec.cut_off)}\n" if spec.cut_off else ""
    command = spec.command if isinstance(spec.command, str) else shlex.join(spec.command)
    start = LogStart(run_id=spec.run_id, attempt=spec.attempt, time=time.time(), command=command)
    return cut_off.encode() + start.line()


def _folders(spec: AttemptSpec) -> list[str]:
    """Return the folders in which the stage may have run out of space."""
    told = (spec.environ.get(f"SYNCD_{name}_DIR") for name in ("CHECKPOINT", "ARTIFACT"))
    temporary = spec.environ.get("TMPDIR") or os.environ.get("TMPDIR") or "/tmp"
    return [spec.cwd, os.path.dirname(spec.log), *filter(None, told), temporary]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
