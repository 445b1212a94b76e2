"""How a remote of each type wants to be used: how often to look, how fast to write, what to check.

One table, `profile_for`, chosen by rclone's type of the remote. Where the numbers come from, and
what was tested against what: docs/remotes.md.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

# Types that are another remote underneath, which their option `remote` names.
WRAPPERS = frozenset({"alias", "chunker", "compress", "crypt", "hasher"})

# For rclone's own environment, unless the person has set these there.
ENVIRONMENT = {
    # Its WebDAV backend sleeps 10 ms between calls, of which a small upload makes three: 33 ms on
    # the loopback, against 7 ms at 1 ms. Not 0, from which its back-off after an error cannot grow.
    "RCLONE_WEBDAV_PACER_MIN_SLEEP": "1ms",
    # We delete thousands of objects a day, all our own; in the trash they would fill the account
    # for 30 days. (On a shared drive only a manager may delete for good.)
    "RCLONE_DRIVE_USE_TRASH": "false",
}


@dataclass(frozen=True, kw_only=True)
class Profile:
    """How to use a remote.

    `poll_seconds`: how often to look for new objects while anything goes on.
    `idle_poll_seconds`: how often, once nothing has for long.
    `gather_seconds`: how long what is to be sent gathers after a pack, so that it goes as one.
    `creations_per_second`: how many objects may be begun a second; None, as they come.
    `check_target`: look whether an object is there before it is uploaded, since the remote would
    keep two of one name.
    `transfers`: how many large objects go at a time.
    `answer_seconds`: how long a call may take before it is made again by a new connection; what is
    always slower is met by more (`rclone.patience`).
    `durable`: whether what was uploaded outlives both ends' machines; not where it may lie on one.
    """

    poll_seconds: float
    idle_poll_seconds: float
    gather_seconds: float = 0.1
    creations_per_second: float | None = None
    check_target: bool = False
    transfers: int = 4
    answer_seconds: float = 10.0
    durable: bool = False


# A folder on this machine, or one that another program keeps in sync: calls cost nothing, and two
# transfers fill a disk.
LOCAL = Profile(poll_seconds=0.25, idle_poll_seconds=5.0, transfers=2)

# `rclone serve webdav`, so most likely our own bridge: nobody counts its calls. Looking every
# 0.25 s takes half of that on average from a line's 1.0 s. When idle, a listing every 4 s, with
# heartbeats and all else, stays under 30 calls a minute. Each pack costs about 2.3 KB of HTTP, so a
# log that floods is gathered for 0.25 s; a single line goes at once.
BRIDGE = Profile(poll_seconds=0.25, idle_poll_seconds=4.0, gather_seconds=0.25)

# Someone else's WebDAV, mostly a small PHP server (Nextcloud) that takes 0.1 s and more a call.
WEBDAV = Profile(poll_seconds=1.0, idle_poll_seconds=15.0, gather_seconds=0.5, durable=True)

# A connection is kept open, and a listing is one exchange over it.
SFTP = Profile(poll_seconds=0.5, idle_poll_seconds=6.0, durable=True)

# Each listing and each upload is paid for: at 0.005 USD a thousand (S3 Standard, us-east-1),
# looking once a second costs 0.43 USD a day at each end, and every 15 s 0.03 USD.
S3 = Profile(
    poll_seconds=1.0, idle_poll_seconds=15.0, gather_seconds=0.5, transfers=8, durable=True
)

# "About 2 files per second only", and 10 calls a second as a default quota of a client id, which
# rclone's users share unless they make their own (rclone's manual, "drive": Limitations). Two
# files of one name are allowed there. Idle: 6 calls a minute. An answer may take long, since rclone
# waits for 1, 2, 4 s and so on when Drive says that calls were too many.
DRIVE = Profile(
    poll_seconds=2.0,
    idle_poll_seconds=30.0,
    gather_seconds=1.0,
    creations_per_second=2.0,
    check_target=True,
    answer_seconds=60.0,
    durable=True,
)

# Writes to one account exclude each other and fail as `too_many_write_operations` when many come at
# a time; rclone's pacer then holds back for as long as Dropbox asks (rclone issues 1539 and 5156).
DROPBOX = Profile(
    poll_seconds=2.0,
    idle_poll_seconds=30.0,
    gather_seconds=1.0,
    creations_per_second=4.0,
    transfers=2,
    answer_seconds=60.0,
    durable=True,
)

# Calls are counted by user, app and tenant together, and one who has had too many is told to wait
# for minutes (429 and Retry-After; Microsoft, "Avoid getting throttled or blocked in SharePoint").
ONEDRIVE = replace(DROPBOX, transfers=4)

# What we know nothing of is used with care: it may keep two files of one name.
OTHER = Profile(
    poll_seconds=1.0,
    idle_poll_seconds=15.0,
    gather_seconds=0.5,
    check_target=True,
    transfers=2,
    answer_seconds=60.0,
)

_BY_TYPE = {
    "bridge": BRIDGE,
    "local": LOCAL,
    "webdav": WEBDAV,
    "sftp": SFTP,
    "s3": S3,
    "drive": DRIVE,
    "dropbox": DROPBOX,
    "onedrive": ONEDRIVE,
}


TYPES = tuple(_BY_TYPE)


def profile_for(kind: str, options: Mapping[str, str]) -> Profile:
    """Return the profile of rclone's type `kind`, given the options of the remote."""
    if kind == "webdav" and options.get("vendor") == "rclone":
        return BRIDGE
    return _BY_TYPE.get(kind, OTHER)


class Pace:
    """Lets so many things begin a second, in the order in which they come, from any thread."""

    def __init__(self, per_second: float | None) -> None:
        self._interval = 1 / per_second if per_second else 0.0
        self._next = 0.0
        self._lock = threading.Lock()

    def wait(self) -> None:
        """Return when the next one may begin."""
        with self._lock:
            begin = max(time.monotonic(), self._next)
            self._next = begin + self._interval
        time.sleep(max(0.0, begin - time.monotonic()))
