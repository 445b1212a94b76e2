"""What a test needs of the machine: small disks to fill, and how much memory a process took."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def small_disk(path: Path, mebibytes: int) -> Iterator[None]:
    """Mount an empty disk of so many MiB at `path`; skip the test where that is not allowed."""
    path.mkdir(parents=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={mebibytes}m,mode=755", "tmpfs", str(path)]
    if os.getuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("no disk can be mounted here: it takes root")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=True)


@contextlib.contextmanager
def folding_disk(image: Path, path: Path) -> Iterator[None]:
    """Mount at `path` a disk that does not tell names apart by case, as macOS and Windows have.

    `image` is made to hold it. Skips the test where such a disk cannot be made or mounted.
    """
    path.mkdir(parents=True)
    with open(image, "wb") as file:
        file.truncate(64 * 1024 * 1024)
    commands = [
        ["mkfs.vfat", str(image)],
        ["mount", "-o", "loop,iocharset=utf8", str(image), str(path)],
    ]
    for command in commands:
        if shutil.which(command[0]) is None:
            pytest.skip(f"there is no {command[0]}")
        if subprocess.run(command, capture_output=True, check=False).returncode:
            pytest.skip(f"{command[0]} does not work here")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=True)


def fill(path: Path) -> None:
    """Make `path` a file that takes all the space that is left on its disk."""
    with contextlib.suppress(OSError), open(path, "wb", buffering=0) as file:
        for block in (1024 * 1024, 4096, 1):
            with contextlib.suppress(OSError):
                while True:
                    file.write(b"x" * block)


def peak_memory(pid: int) -> int:
    """Return the most memory that a process ever had resident, in bytes, as the kernel counts."""
    status = Path(f"/proc/{pid}/status").read_text()
    found = re.search(r"^VmHWM:\s+(\d+) kB$", status, re.MULTILINE)
    assert found, status
    return int(found[1]) * 1024
