"""How much memory a loader takes beyond the page cache, in a process of its own.

    python -m trainer.bench.memory FOLDER

prints, as JSON, how much anonymous memory grew when the files in FOLDER were opened and an epoch
of their clips was loaded, after everything was imported and compiled; Linux alone tells that.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np

from protocol.bench import Figure
from protocol.errors import DataError
from trainer.bench.clips import CLIPS_A_BATCH, NBYTES
from trainer.loader import Fixed, Kernel, Loader, open_rows
from trainer.loader.kernels import Move, choose
from trainer.loader.loader import PREFETCH_BYTES

SMAPS = Path("/proc/self/smaps_rollup")
BYTES_A_ROW = 40
SLACK = 20_000_000
BATCHES_APART = 64
IN_THE_MAKING = 3  # one in each of two threads, one at the consumer


def figures(folder: Path) -> list[Figure]:
    """Measure the clips in `folder`. Nothing where the system does not tell."""
    if not SMAPS.exists():
        return []
    command = [sys.executable, "-m", "trainer.bench.memory", str(folder)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise DataError("measure a loader's memory", path=folder, why="the process for it failed")
    found = json.loads(done.stdout)
    ring = PREFETCH_BYTES + IN_THE_MAKING * NBYTES
    bound = ring + BYTES_A_ROW * found["rows"] + SLACK
    return [
        Figure(
            name=f"memory: {found['rows']} clips, opened",
            value=found["opened"] / found["rows"],
            unit="bytes a row",
        ),
        Figure(
            name=f"memory: {found['rows']} clips, an epoch loaded",
            value=found["loaded"] / 1e6,
            unit="MB",
            goal=f"<= {bound / 1e6:.1f}",
            baseline=found["mapped"] / 1e6,
            baseline_name="the files",
        ),
    ]


def anonymous() -> int:
    """Return the bytes of this process that no file holds."""
    match = re.search(r"^Anonymous: +([0-9]+) kB$", SMAPS.read_text("ascii"), re.MULTILINE)
    if not match:
        raise DataError("measure memory", path=SMAPS, why="it does not tell anonymous memory")
    return int(match[1]) * 1024


def measure(shards: list[Path]) -> dict[str, int]:
    """Open the shards and load an epoch; return what that took, in bytes, and the rows."""
    nothing, clips = np.empty(0, np.int64), np.empty((0, 1), np.float32)
    choose(Kernel.AUTO).pad([Move(nothing, nothing, clips.dtype, clips)])
    before = anonymous()
    source = open_rows(shards)
    opened = anonymous() - before
    loaded = 0
    loader = Loader(source, Fixed(size=CLIPS_A_BATCH))
    for step, _ in enumerate(loader):
        if step % BATCHES_APART == 0:
            loaded = max(loaded, anonymous() - before)
    return {"rows": len(source), "mapped": source.nbytes, "opened": opened, "loaded": loaded}


if __name__ == "__main__":
    print(json.dumps(measure(sorted(Path(sys.argv[1]).glob("*.arrow")))))
