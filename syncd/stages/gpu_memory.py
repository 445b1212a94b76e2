"""What the GPUs hold, by nvidia-smi's word: read before an attempt, and again when it has ended.

A process that ends gives its memory back, unless the driver cannot let go of it. An attempt's end
waits for that, for a while, and then says what is still held; so the next run is not started on a
full GPU without a word. Where there is no nvidia-smi, nothing is known and nothing is done.
"""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from syncd.platform import Identity

PROGRAM = "nvidia-smi"
ANSWER_SECONDS = 10.0
FREE_SECONDS = 10.0
PAUSE_SECONDS = 0.5
# Less than the context of any process that computes (hundreds of MiB), more than the driver's own
# ups and downs.
NOISE_BYTES = 128 * 2**20
# In the background of a shell that ends at once: a driver that hangs hangs nobody who waits.
_ASK = (
    f"({PROGRAM} --query-gpu=index,uuid,memory.used --format=csv,noheader,nounits;"
    f" {PROGRAM} --query-compute-apps=gpu_uuid,pid,used_gpu_memory --format=csv,noheader,nounits) &"
)


@dataclass(frozen=True, kw_only=True)
class GpuUse:
    """Bytes in use: on each GPU, by its index, and by each process listed, as `index/process id`.

    In a container the list may be empty, or hold the host's process ids.
    """

    used: Mapping[str, int] = field(default_factory=dict)
    processes: Mapping[str, int] = field(default_factory=dict)


def read_gpus() -> GpuUse | None:
    """Ask nvidia-smi; None where there is none, or it does not answer within 10 seconds.

    What is started for it is no child of this process, unless that is a subreaper.
    """
    folders = os.get_exec_path()
    if not any(os.access(os.path.join(folder, PROGRAM), os.X_OK) for folder in folders):
        return None
    try:
        use = parse(_ask())
    except OSError:  # no process can be had for it: then nothing is known
        return None
    return use if use.used else None


def _ask() -> str:
    out, into = os.pipe()
    try:
        try:
            shell = os.posix_spawn(
                "/bin/sh",
                ["sh", "-c", _ASK],
                os.environ,
                file_actions=[
                    (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                    (os.POSIX_SPAWN_DUP2, into, 1),
                    (os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0),
                ],
                setsid=True,
                setsigmask=(),
                setsigdef=(signal.SIGPIPE,),
            )
        finally:
            os.close(into)
        os.waitpid(shell, 0)
        return _read(out, time.monotonic() + ANSWER_SECONDS)
    finally:
        os.close(out)


def _read(fd: int, deadline: float) -> str:
    """Read to the end; "" when that does not come before the deadline."""
    data = b""
    while select.select([fd], [], [], max(deadline - time.monotonic(), 0.0))[0]:
        part = os.read(fd, 65536)
        if not part:
            return data.decode("utf-8", "replace")
        data += part
    return ""


def parse(text: str) -> GpuUse:
    """Read what nvidia-smi printed: `0, GPU-<uuid>, <MiB>` and `GPU-<uuid>, <pid>, <MiB>` a line.

    Lines without numbers ("[N/A]") are passed over.
    """
    rows = [[cell.strip() for cell in line.split(",")] for line in text.splitlines()]
    gpus = {row[1]: row[0] for row in rows if len(row) == 3 and row[0].isdecimal()}
    used: dict[str, int] = {}
    processes: dict[str, int] = {}
    for row in rows:
        if len(row) != 3 or not row[2].isdecimal():
            continue
        if row[0].isdecimal():
            used[row[0]] = int(row[2]) * 2**20
        elif row[0] in gpus:
            processes[f"{gpus[row[0]]}/{row[1]}"] = int(row[2]) * 2**20
    return GpuUse(used=used, processes=processes)


def still_held(before: GpuUse, now: GpuUse, alive: Callable[[int], bool]) -> Iterator[str]:
    """Yield, for each GPU that holds more than before, what a person should know.

    What processes hold that are alive, and so are not of the attempt that ended, does not count.
    """
    for gpu, used in now.used.items():
        rise = used - before.used.get(gpu, used)
        left: list[str] = []
        for key, held in now.processes.items():
            at, pid = key.split("/")
            if at == gpu and alive(int(pid)):
                rise -= max(held - before.processes.get(key, 0), 0)
            elif at == gpu and key not in before.processes:
                left.append(pid)
        if rise >= NOISE_BYTES or (left and rise > 0):
            whose = f" (process {', '.join(left)})" if left else ""
            yield f"GPU {gpu} still holds {rise / 2**30:.1f} GiB{whose}"


def wait_until_free(before: GpuUse, shared: Callable[[], bool]) -> str:
    """Wait until the GPUs hold no more than before; return what is still held after 10 seconds.

    Where `shared` says that others are at work meanwhile, it cannot be told whose memory it is, and
    nothing is waited for or said.
    """
    deadline = time.monotonic() + FREE_SECONDS
    while True:
        now = read_gpus()
        if now is None:
            return f"{PROGRAM} does not answer any more"
        held = "; ".join(still_held(before, now, _alive))
        if not held or shared():
            return ""
        if time.monotonic() >= deadline:
            return held
        time.sleep(PAUSE_SECONDS)


def _alive(pid: int) -> bool:
    process = Identity.of(pid)
    return process is not None and process.alive()
