"""How a worker has ended is told with how often and when, and not for ever."""

from __future__ import annotations

import time
from pathlib import Path

from syncd.notebook.endings import TOLD_SECONDS, Endings, last_error, told_code

LOG = "syncd: error: of before\n{start}12:00:00 something\nsyncd: error: disk full\na last word\n"


def test_an_end_is_told_for_ten_minutes() -> None:
    endings = Endings()
    assert endings.told() == ""
    endings.note("killed by signal 9")
    now = time.monotonic()
    assert "is started again: killed by signal 9" in endings.told(now=now)
    assert endings.told(now=now + TOLD_SECONDS + 1) == ""


def test_it_is_told_how_often() -> None:
    endings = Endings()
    for _ in range(3):
        endings.note("")
    assert endings.told().endswith("and is started again (3 times so far)")


def test_the_reason_is_what_the_process_itself_said_and_no_other_line(tmp_path: Path) -> None:
    log = tmp_path / "watch.log"
    before, _, after = LOG.partition("{start}")
    log.write_text(before + after)
    assert last_error(log, len(before)) == "disk full"
    assert told_code(5, log, len(before)) == "exit code 5: disk full"
    assert told_code(5, log, len(before + after)) == "exit code 5"
    assert told_code(-9, log, 0) == "killed by signal 9"
    assert last_error(tmp_path / "none", 0) == ""
