"""The example of the loader, as a program and as a loop that goes on."""

import math
import os
import subprocess
import sys
from pathlib import Path

TRAIN = Path(__file__).parents[2] / "examples" / "loader" / "train.py"


def run(folder: Path, code: str = "") -> list[str]:
    """Run it, or `code` after its import; return its lines."""
    command = [sys.executable, "-c", code] if code else [sys.executable, str(TRAIN)]
    done = subprocess.run(
        [*command, str(folder)],
        env={**os.environ, "PYTHONPATH": str(TRAIN.parent)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_it_learns_and_ends_with_the_same_loss_when_it_was_interrupted(tmp_path: Path):
    told = run(tmp_path / "whole")
    assert [line.split(":")[0] for line in told] == ["epoch 1", "epoch 2", "epoch 3"]
    # The entropy of a token given the one before: 7 of 8 to 1 of 8.
    entropy = -(7 / 8 * math.log(7 / 8) + 1 / 8 * math.log(1 / 8))
    assert abs(float(told[-1].rpartition(" ")[2]) - entropy) < 0.1
    first = run(
        tmp_path / "parts",
        "import sys, train, pathlib; train.EPOCHS = 1; train.main(pathlib.Path(sys.argv[1]))",
    )
    assert first + run(tmp_path / "parts") == told
