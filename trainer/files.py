"""Files that may be missing, damaged or refused by the system: read and written with clear errors.

Every record that the trainer keeps as JSON is read by `read_record`, and every file that it makes
is written within `writing`, so that a full disk or a folder without permission is told like any
other mistake: what was being done, to which path, why it failed, what to do next.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

from protocol.errors import DataError
from protocol.schema import decode, loads

T = TypeVar("T")

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_FORBIDDEN = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})


def read_record(cls: type[T], path: Path, *, what: str, hint: str = "") -> T | None:
    """Read the dataclass `cls` from a JSON file; None when there is no such file.

    `what` says what is being done, `hint` how to mend a file that is damaged. Raises DataError
    when the file cannot be read, is not JSON, or does not hold such a record.
    """
    try:
        return decode(cls, loads(path.read_bytes()))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise DataError(what, path=path, why=reason(error), hint=hint) from error


@contextlib.contextmanager
def writing(what: str, path: Path) -> Iterator[None]:
    """Raise what the system refuses in the block as a DataError that names `path`."""
    try:
        yield
    except OSError as error:
        raise refused(what, path, error) from error


def refused(what: str, path: Path | str | None, error: OSError) -> DataError:
    """Return the user's error for what the system refused, with what to do about it."""
    return DataError(what, path=path, why=reason(error), hint=_hint(error))


def reason(error: OSError | ValueError) -> str:
    """Return why, without the path and the number that an OSError's own text has."""
    return error.strerror or str(error) if isinstance(error, OSError) else str(error)


def _hint(error: OSError) -> str:
    if error.errno in _FULL:
        return "Free some space and try again; what was written before stays good."
    if error.errno in _FORBIDDEN:
        return "Check who may write there, or choose another folder."
    return ""
