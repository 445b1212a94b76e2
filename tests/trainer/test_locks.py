"""Tests of trainer/locks.py."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from protocol.errors import BusyError
from trainer.locks import locked

HOLD = "import sys; from pathlib import Path; from trainer.locks import locked\n"
HOLD += "with locked(Path(sys.argv[1])):\n    print('held', flush=True); sys.stdin.read()"


def test_a_lock_that_another_process_holds_is_refused_and_free_when_it_ends(
    tmp_path: Path,
) -> None:
    path = tmp_path / "lock"
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(BusyError, match="another process holds it"):
            locked(path, timeout=0.05)
        holder.kill()
    with locked(path, timeout=10):
        assert path.exists()
