"""What the benchmark's stages run: `python -m syncd.bench.programs NAME ARGUMENT...`

lines COUNT               lines that begin with the time, in ns, at which they were written
text SECONDS RATE         a training log of RATE bytes a second
bar SECONDS               progress bars as tqdm draws them
silent SECONDS            nothing
large BYTES GO            that many bytes of log, and 4 KiB more once the file GO is there
artifact SOURCE MARK      move a file into the artefact folder, and write the time into MARK
"""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path

READY = "[ready]"
APPENDED = 4096
BAR_WIDTH = 10
BAR_SECONDS = 0.1  # tqdm's own `mininterval`


def program(name: str, *arguments: object) -> list[str]:
    """Return the command line of one of the benchmark's own programs."""
    return [sys.executable, "-m", "syncd.bench.programs", name, *map(str, arguments)]


def lines(count: str) -> None:
    """Write lines at random moments, so that no phase of anybody's polling is preferred."""
    for _ in range(int(count)):
        time.sleep(random.uniform(0.3, 1.3))
        print(time.time_ns(), "a line of a log", flush=True)


def training_log(seed: int) -> Iterator[str]:
    """Yield the lines of a training log: most of a line repeats, its numbers are new each time."""
    drawn = random.Random(seed)
    clock, loss = 1_796_025_600.0, 2.4
    for step in range(sys.maxsize):
        clock += drawn.uniform(0.08, 0.12)
        loss = max(0.05, loss + drawn.gauss(-0.0005, 0.02))
        stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(clock))
        yield (
            f"{stamp},{int(clock * 1000) % 1000:03d} INFO train: epoch {step // 5000} "
            f"step {step % 5000}/5000 loss {loss:.4f} acc {max(0.0, 1 - loss / 3):.4f} "
            f"lr {6e-4 * 0.99999**step:.3e} grad_norm {drawn.gauss(1.1, 0.2):.3f} "
            f"tokens/s {drawn.gauss(18400, 250):.0f} data {drawn.uniform(0.5, 3):.1f} ms "
            f"mem 14.2/15.8 GiB\n"
        )


def text(seconds: str, rate: str) -> None:
    """Write a training log at an even rate, a line when it is due."""
    began, written = time.monotonic(), 0
    for line in training_log(seed=1):
        due = began + written / float(rate)
        if due > began + float(seconds):
            break
        time.sleep(max(0.0, due - time.monotonic()))
        sys.stdout.write(line)
        sys.stdout.flush()
        written += len(line)
    print(READY, flush=True)


def drawn_bar(step: int, total: int, elapsed: float) -> str:
    """Return one state of a bar, as tqdm draws it."""
    filled = "█" * (step * BAR_WIDTH // total)
    rate = step / elapsed if elapsed else 0.0
    left = (total - step) / rate if rate else 0.0
    times = f"{_clock(elapsed)}<{_clock(left)}, {rate:6.2f}it/s, loss={2.4 / (1 + step):.4f}"
    return f"\r{step * 100 // total:3d}%|{filled:<{BAR_WIDTH}}| {step}/{total} [{times}]"


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60:02d}:{int(seconds) % 60:02d}"


def bar(seconds: str) -> None:
    """Draw bars of a quarter of a minute each, redrawn ten times a second."""
    began, total = time.monotonic(), 150
    while time.monotonic() - began < float(seconds):
        start = time.monotonic()
        for step in range(total + 1):
            print(drawn_bar(step, total, time.monotonic() - start), end="", flush=True)
            time.sleep(BAR_SECONDS)
        print(flush=True)
    print(READY, flush=True)


def silent(seconds: str) -> None:
    """Say nothing until the end."""
    time.sleep(float(seconds))
    print(READY, flush=True)


def incompressible(size: int) -> bytes:
    """Return one line of random bytes; none of them ends the line or draws over it."""
    return os.urandom(size - 1).translate(bytes.maketrans(b"\r\n", b"\x0e\x0f")) + b"\n"


def large(size: str, go: str) -> None:
    """Write a large log, and a little more to it when asked to."""
    block = "".join(line for _, line in zip(range(8000), training_log(seed=2), strict=False))
    left = int(size)
    while left > 0:
        part = block[:left]
        sys.stdout.write(part)
        left -= len(part)
    print(READY, flush=True)
    while not Path(go).exists():
        time.sleep(0.01)
    sys.stdout.buffer.write(incompressible(APPENDED))
    sys.stdout.buffer.flush()
    time.sleep(5.0)  # what the end of a run costs is not what is counted


def artifact(source: str, mark: str) -> None:
    """Make a file an artefact of this run: it was written before, so nothing of that is timed."""
    target = Path(os.environ["SYNCD_ARTIFACT_DIR"]) / Path(source).name
    Path(source).rename(target)
    Path(mark).write_text(f"{time.time_ns()}\n")


PROGRAMS = {each.__name__: each for each in (lines, text, bar, silent, large, artifact)}

if __name__ == "__main__":
    PROGRAMS[sys.argv[1]](*sys.argv[2:])
