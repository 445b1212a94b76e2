"""`syncd bench checkpoints`: how much of each checkpoint those before it held already.

What chunks by content hash would save of the uploads: each file is cut into pieces, and a piece
that was in an earlier one need not be sent again. Pieces are blocks of one size, or end where the
content says so (FastCDC's gear hash, Xia et al. 2016), which finds what has moved as well.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import shlex
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from protocol.bench import Figure
from protocol.errors import RunFailedError
from protocol.logs import one_line
from protocol.status import size

LOOK_SECONDS = 0.02
AVERAGE = 8192
_RANDOM = random.Random(7)
_GEAR = [_RANDOM.getrandbits(64) for _ in range(256)]
Cut = Callable[[bytes], Iterable[bytes]]


def blocks(length: int, data: bytes) -> Iterator[bytes]:
    """Yield blocks of `length` bytes; the last may be shorter."""
    for at in range(0, len(data), length):
        yield data[at : at + length]


def by_content(data: bytes) -> Iterator[bytes]:
    """Yield pieces of 2 to 32 KiB, about 8, that end where the 64 bytes before say so."""
    mask = (AVERAGE - 1) << 40
    start = hashed = 0
    for at, byte in enumerate(data):
        hashed = ((hashed << 1) + _GEAR[byte]) & 0xFFFFFFFFFFFFFFFF
        length = at - start + 1
        if (length >= AVERAGE // 4 and not hashed & mask) or length >= AVERAGE * 4:
            yield data[start : at + 1]
            start, hashed = at + 1, 0
    if start < len(data):
        yield data[start:]


CUTS: dict[str, Cut] = {
    "whole files": lambda data: [data],
    "blocks of 64 KiB": lambda data: blocks(64 * 1024, data),
    "blocks of 4 KiB": lambda data: blocks(4096, data),
    "pieces of about 8 KiB by content": by_content,
}


def sent(files: Sequence[bytes], cut: Cut) -> float:
    """Return which part of the bytes of all files but the first was in none before it."""
    seen: set[bytes] = set()
    total = new = 0
    for number, data in enumerate(files):
        for piece in cut(data):
            digest = hashlib.sha256(piece).digest()
            if number:
                total += len(piece)
                new += 0 if digest in seen else len(piece)
            seen.add(digest)
    return new / total if total else 1.0


def figures(files: Sequence[bytes]) -> list[Figure]:
    """Return the table's rows: one for each way to cut."""
    later = files[1:]
    of = f"of the {size(sum(map(len, later)))} of {len(later)} checkpoints after the first"
    return [
        Figure(name=f"sent, as {name}, {of}", value=100 * sent(files, cut), unit="%")
        for name, cut in CUTS.items()
    ]


def written(folder: Path, command: Sequence[str], pattern: str) -> list[bytes]:
    """Run a training and return each file that it adds below a folder, in order of time.

    Those that it removes again are kept meanwhile. Raises RunFailedError when it fails.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".kept-") as kept:
        ended, known = threading.Event(), {path.stat().st_ino for path in folder.rglob(pattern)}
        keeper = threading.Thread(target=_keep, args=(folder, Path(kept), pattern, known, ended))
        keeper.start()
        try:
            _run(command)
        finally:
            ended.set()
            keeper.join()
        return read(Path(kept), "*")


def _run(command: Sequence[str]) -> None:
    """Run a command, with all that it prints on standard error: standard output is the table's.

    Raises RunFailedError, with the last line that it has printed.
    """
    what, last = f"run {shlex.join(command)}", b""
    try:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    except OSError as error:
        raise RunFailedError(what, why=error.strerror or str(error)) from error
    with process as running:
        assert running.stdout is not None
        while data := os.read(running.stdout.fileno(), 65536):
            sys.stderr.write(data.decode("utf-8", "replace"))
            sys.stderr.flush()
            last = (last + data)[-4096:]
    if running.returncode:
        said = [line.strip() for line in last.decode("utf-8", "replace").splitlines()]
        line = next(filter(None, reversed(said)), "and printed nothing")
        raise RunFailedError(what, why=f"it ended with {running.returncode}: {one_line(line)}")


def read(folder: Path, pattern: str) -> list[bytes]:
    """Return the files below a folder, in order of time."""
    found = [path for path in folder.rglob(pattern) if path.is_file()]
    return [path.read_bytes() for path in sorted(found, key=lambda p: p.stat().st_mtime_ns)]


def _keep(folder: Path, kept: Path, pattern: str, known: set[int], ended: threading.Event) -> None:
    """Link every file that appears, by its inode."""
    while True:
        last = ended.wait(LOOK_SECONDS)
        for path in folder.rglob(pattern):
            with contextlib.suppress(FileNotFoundError, FileExistsError):
                if (inode := path.stat().st_ino) not in known:
                    os.link(path, kept / str(inode))
        if last:
            return
