"""Reading a file that somebody else makes: a regular one, or none at all."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import IO

# For os.open, where a system has no such flag: Windows opens as text without the first one.
BINARY: int = getattr(os, "O_BINARY", 0)
NO_WAIT: int = getattr(os, "O_NONBLOCK", 0)
NO_FOLLOW: int = getattr(os, "O_NOFOLLOW", 0)


def open_regular(path: Path, *, follow: bool = True) -> IO[bytes]:
    """Open a regular file for reading; a link is followed only with `follow`.

    Never waits, as an open of a pipe would until somebody writes into it. Raises OSError; with
    EINVAL for what is there and no regular file, ELOOP for a link.
    """
    flags = NO_WAIT | (0 if follow else NO_FOLLOW)
    file = open(path, "rb", opener=lambda name, given: os.open(name, given | flags))
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return file


def read_regular(path: Path, limit: int = -1) -> bytes:
    """Return the content of a regular file, up to `limit` bytes of it. Raises OSError."""
    with open_regular(path) as file:
        return file.read(limit)
