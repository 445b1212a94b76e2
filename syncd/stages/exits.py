"""An attempt's end, put on record: its log closed, and then `exit.json`, whatever the disk does."""

from __future__ import annotations

import dataclasses
import errno
import os
import time
from pathlib import Path

from protocol.publish import publish_json
from syncd.stages.attempt_files import EXIT, STAGE, LogFile, StageStart, complain, read_file
from syncd.stages.causes import ExitRecord, Facts, judge

_RESERVE = "reserve"
_RESERVE_BYTES = 64 * 1024
_FULL = (errno.ENOSPC, errno.EDQUOT)


def reserve_space(folder: Path) -> None:
    """Take the space that the record will need, so that a full disk does not keep it away.

    Raises OSError when there is none even now.
    """
    # Not zeros, which a file system may store as nothing. Nor durable: it is for this boot.
    with open(folder / _RESERVE, "wb", opener=_private) as file:
        file.write(os.urandom(_RESERVE_BYTES))


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def record_end(folder: Path, facts: Facts, log: LogFile | None) -> None:
    """Close the log, then publish the exit record; wait for as long as the disk is full.

    The caller holds the run's lock. The record counts, not the log, which may be unusable.
    """
    (folder / _RESERVE).unlink(missing_ok=True)
    record = _exit_record(folder, facts)
    if log is not None:
        log.say(record.log_end().line())
        try:
            log.close()
        except OSError as error:
            complain(f"make the log durable: {error}")
    while True:
        try:
            publish_json(folder / EXIT, dataclasses.asdict(record), mode=0o600)
            return
        except OSError as error:
            if error.errno not in _FULL:
                raise
            complain(f"record the end: {error}")
        time.sleep(1.0)


def _exit_record(folder: Path, facts: Facts) -> ExitRecord:
    result, cause = judge(facts)
    start = read_file(folder / STAGE, StageStart)
    return ExitRecord(
        run_id=folder.parent.name,
        attempt=int(folder.name.rpartition("-")[2]),
        result=result,
        cause=cause,
        exit_code=facts.exit_code,
        signal=facts.signal,
        started=start.time if start else None,
        ended=time.time(),
        interrupted=facts.interrupted,
    )
