"""Which process is the `syncd watch` of a folder: noted by itself, once it holds the folder's lock.

Whoever starts one cannot note it: of two that are started at once, one ends at the lock.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from protocol.paths import Layout
from protocol.publish import publish_json
from protocol.schema import decode, loads
from syncd.platform import Identity

# What a notebook's keeper started it as, told by its environment.
VARIABLE = "SYNCD_MADE_OF"


@dataclass(frozen=True, kw_only=True)
class Holder:
    """The process; `made_of` tells what it was started as, "" for one that nobody looks after.

    `mark` is what the file that shows whether it answers had for a time when it began.
    """

    process: Identity
    made_of: str = ""
    mark: int = -1


def note_holder(layout: Layout) -> None:
    """Note this process; call it with the lock held."""
    if process := Identity.of(os.getpid()):
        mark = 0
        with contextlib.suppress(FileNotFoundError):
            mark = (layout.private / "status.json").stat().st_mtime_ns
        made_of = os.environ.get(VARIABLE, "")
        holder = Holder(process=process, made_of=made_of, mark=mark)
        publish_json(_path(layout), asdict(holder), mode=0o600)


def read_holder(layout: Layout) -> Holder | None:
    """Return the process that was noted last, which may have ended; None for none."""
    # A file that is damaged is none: the next one that holds the lock writes it anew.
    with contextlib.suppress(OSError, ValueError):
        return decode(Holder, loads(_path(layout).read_bytes()))
    return None


def _path(layout: Layout) -> Path:
    return layout.private / "holder.json"
