"""Holes: the beginning of a growing file, given back to the disk while a program writes its end.

Nothing moves: sizes and offsets stay what they are, and what was freed reads as zeros, which none
of our readers takes for data. Only whole blocks are freed, from the beginning on, so as long as a
byte is there, all that follow it are.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
from pathlib import Path
from typing import IO

# A multiple of every file system's block: where a hole ends on no such boundary, a file system
# zeroes the rest of the block and counts it as data.
STEP = 8 * 1024 * 1024
_KEEP_SIZE, _PUNCH_HOLE = 0x01, 0x02  # <linux/falloc.h>


def free_until(fd: int, end: int) -> None:
    """Free the bytes of a file before `end`, a multiple of STEP.

    Raises OSError: EOPNOTSUPP where the file system, or the system, cannot do it.
    """
    if end % STEP:
        raise ValueError(f"{end} is no multiple of {STEP}")
    try:
        fallocate = ctypes.CDLL(None, use_errno=True).fallocate
    except (AttributeError, OSError, TypeError) as error:  # only Linux has it
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP)) from error
    fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long)
    if fallocate(fd, _PUNCH_HOLE | _KEEP_SIZE, 0, end) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def data_from(fd: int, at: int) -> int:
    """Return where the data of a file that lies at or after `at` begins; `at` if that is data.

    The file's size when there is none.
    """
    size = os.fstat(fd).st_size
    if not STEP <= size > at:
        return at  # too small for a hole of ours, or nothing is there
    position = os.lseek(fd, 0, os.SEEK_CUR)
    try:
        return os.lseek(fd, at, os.SEEK_DATA)
    except AttributeError:  # Windows, where nothing is ever freed
        return at
    except OSError as error:
        if error.errno == errno.ENXIO:  # no data is left
            return size
        if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
            return at
        raise
    finally:  # a buffered file relies on being where it left its descriptor
        os.lseek(fd, position, os.SEEK_SET)


def held(path: Path) -> int:
    """Return how many bytes of a file are not freed; 0 for what is no file. Raises OSError."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return 0
    if not stat.S_ISREG(found.st_mode):
        return 0
    if found.st_size < STEP:  # the usual case, without a look inside
        return found.st_size
    fd = os.open(path, os.O_RDONLY)
    try:
        return os.fstat(fd).st_size - data_from(fd, 0)
    finally:
        os.close(fd)


def read_from(file: IO[bytes], at: int, end: int, most: int) -> tuple[int, bytes]:
    """Return where the first byte is that a file still has from `at` on, and it and what follows.

    Of the bytes before `end`, and up to `most` of them. What is returned was there, though more may
    be freed meanwhile.
    """
    while True:
        begin = data_from(file.fileno(), at)
        file.seek(begin)
        data = file.read(max(min(most, end - begin), 0))
        if data_from(file.fileno(), begin) == begin:
            return begin, data
