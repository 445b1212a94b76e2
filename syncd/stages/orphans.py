"""What is left of an attempt whose supervisor died: found, ended, and its end put on record.

A new supervisor of the same attempt does it (`syncd.stages.supervisor`): the daemon waits for
nothing, and goes on finding it alive until the end is on record.
"""

from __future__ import annotations

import dataclasses
import os
import time
from pathlib import Path

from protocol.errors import DataError, ExitCode
from protocol.publish import publish_json
from syncd.platform import Identity, boot_id
from syncd.stages.attempt_files import (
    DEFAULT_GRACE,
    EXIT,
    GPU,
    LOCK,
    LOCK_PATIENCE,
    STAGE,
    SUPERVISOR,
    TAIL_BYTES,
    AttemptSpec,
    LogFile,
    StageStart,
    complain,
    fenced_by,
    read_file,
    read_spec,
    stop_reason,
    take_lock,
)
from syncd.stages.causes import Facts, newest_part
from syncd.stages.exits import record_end
from syncd.stages.gpu_memory import GpuUse, wait_until_free
from syncd.stages.process_tree import descendants, end_all, with_variable

# In the environment of each process of an attempt, with the attempt's folder: it finds those that
# left the process tree while no supervisor was there to adopt them.
MARK = b"SYNCD_SUPERVISED"


def remains(folder: Path) -> list[Identity]:
    """Return the living processes of an attempt, found without its supervisor's help.

    They are the stage's own process, each one whose environment carries the attempt's mark, and
    all that descend from these. One that did away with both its parents and its environment
    is not found.
    """
    start = read_file(folder / STAGE, StageStart)
    roots = [start.identity] if start and start.identity.alive() else []
    mine = os.fsencode(os.path.abspath(folder))
    roots += [process for process, value in with_variable(MARK) if value == mine]
    return list(dict.fromkeys([*roots, *descendants(roots)]))


def any_alive(run_dir: Path) -> bool:
    """Whether processes of an attempt that nobody supervised to its end are alive.

    The lock does not tell: the stage's own process holds it, and not all of its descendants do.
    """
    unfinished = (f.parent for f in run_dir.glob(f"attempt-*/{STAGE}"))
    return any(remains(folder) for folder in unfinished if not (folder / EXIT).exists())


def held_gpu_memory(folder: Path) -> str:
    """Return what of the GPUs' memory an attempt that has ended still holds; "" for nothing.

    Waits for a while for it to be freed. Where another run of this worker is alive, it cannot be
    told whose memory it is.
    """
    try:
        before = read_file(folder / GPU, GpuUse)
    except DataError as error:
        complain(str(error))  # and no end is kept from being recorded
        return ""
    return wait_until_free(before, lambda: _another_is_alive(folder)) if before else ""


def _another_is_alive(folder: Path) -> bool:
    mine = os.fsencode(os.path.abspath(folder))
    runs = os.path.join(os.path.dirname(os.path.dirname(mine)), b"")
    return any(value.startswith(runs) and value != mine for _, value in with_variable(MARK))


def is_orphaned(folder: Path) -> bool:
    """Whether the attempt's command was started, and its supervisor died before its end.

    A supervisor says who it is before it starts the command, so none is overlooked.
    """
    if not (folder / STAGE).exists() or (folder / EXIT).exists():
        return False
    supervisor = read_file(folder / SUPERVISOR, Identity)
    return supervisor is None or not supervisor.alive()


def take_over(folder: Path, me: Identity) -> int:
    """End what is left of an orphaned attempt, and record its end; return the exit code.

    Two that do so at once do no harm: the run's lock lets one of them write the record.
    """
    rebooted = _is_of_another_boot(folder)
    publish_json(folder / SUPERVISOR, dataclasses.asdict(me), mode=0o600)
    spec, log = _spec_and_log(folder)
    grace = spec.grace if spec else DEFAULT_GRACE
    had_to_kill = end_all(lambda: remains(folder) or None, grace, time.sleep, complain)
    lock = take_lock(folder.parent / LOCK, patience=LOCK_PATIENCE)
    if lock is None:
        return ExitCode.BUSY
    if (folder / EXIT).exists():
        return ExitCode.OK
    fence = spec.fence if spec else ""
    facts = Facts(
        rebooted=rebooted,
        stop=stop_reason(folder, fence),
        fenced_by=fenced_by(fence),
        had_to_kill=had_to_kill,
        gpu_held=held_gpu_memory(folder),
        tail=newest_part(log.tail(TAIL_BYTES, 0)) if log else b"",
    )
    record_end(folder, facts, log)
    return ExitCode.OK


def _is_of_another_boot(folder: Path) -> bool:
    start = read_file(folder / STAGE, StageStart)
    return start is not None and start.identity.boot != boot_id()


def _spec_and_log(folder: Path) -> tuple[AttemptSpec | None, LogFile | None]:
    """Return what is usable of the two: that one is not keeps no end from being recorded."""
    try:
        spec = read_spec(folder)
        return spec, LogFile(Path(spec.log))
    except (DataError, OSError) as error:
        complain(str(error))
        return None, None
