"""Which chunks are really on the remote, and how that is known.

An upload that succeeded is no proof: it says that somebody took the bytes. A chunk is proved when
the remote's own hash of it is right, when the controller has found it whole on its own disk and
says so, or when it was read back. Where there are several remotes, that is asked of the anchor.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Collection, Iterable
from enum import StrEnum
from pathlib import Path

from protocol.errors import DataError
from protocol.publish import temporary_beside
from syncd.delivery.chunks import parse
from syncd.rclone.profiles import BRIDGE
from syncd.rclone.remote import NotFound, Remote
from syncd.state import State

# How long the controller, which has the bridge's objects on its disk, is waited for: after it was
# last heard, and at most.
SILENT_SECONDS = 120.0
WAIT_SECONDS = 600.0
# Where others copy chunks to the anchor, one that is not whole there may be on its way for so long.
COPY_SECONDS = 60.0
# So many chunks are read back in one round.
READS_A_ROUND = 4
READ_BACK = "read back"


class Step(StrEnum):
    """What is next to be done about a chunk that is not proved."""

    ASK = "ask"
    WAIT = "wait"
    READ = "read"


def next_step(*, has_hash: bool, hosted: bool, waited: float, silent: float) -> Step:
    """Return how to find out about a chunk.

    `has_hash`: the remote has a hash of it that this end knows too. `hosted`: the controller may
    have it on its own disk. `waited`: seconds since it could know of it; `silent`: since it was
    heard. Reading back costs as much as sending did, of the same person's line.
    """
    if has_hash:
        return Step.ASK
    if hosted and waited < WAIT_SECONDS and min(waited, silent) < SILENT_SECONDS:
        return Step.WAIT
    return Step.READ


class Proofs:
    """Those of one end's chunks. Safe to use from several threads."""

    def __init__(
        self, state: State, remote: Callable[[], Remote], scratch: Path, heard: Callable[[], float]
    ) -> None:
        """`heard` tells when the other end was last heard, by the monotonic clock."""
        self._state = state
        self._remote = remote
        self._scratch = scratch
        self._heard = heard
        self._since: dict[str, float] = {}  # for which chunks a proof is wanted, and since when
        self._no_hash: set[str] = set()  # chunks of which the remote has none, against its kind
        self._not_whole: dict[str, float] = {}  # chunks that were not, and since when

    def how(self, objects: Collection[str]) -> str:
        """Return how these chunks are proved, in words; "" when one of them is not."""
        found = set()
        for path in objects:
            row = self._state.row("SELECT how FROM proofs WHERE object = ?", path)
            if row is None or not row[0]:
                return ""
            found.add(str(row[0]))
        return ", ".join(sorted(found))

    def note(self, objects: Iterable[str], how: str) -> None:
        """Take chunks for proved."""
        for path in objects:
            self._since.pop(path, None)
            self._state.run(
                "INSERT INTO proofs (object, how) VALUES (?, ?)"
                " ON CONFLICT (object) DO UPDATE SET how = excluded.how",
                path,
                how,
            )

    def keep_only(self, objects: Collection[str]) -> None:
        """Forget all other chunks."""
        with self._state.transaction():
            for (path,) in self._state.rows("SELECT object FROM proofs"):
                if path not in objects:
                    self._state.run("DELETE FROM proofs WHERE object = ?", path)
        self._since = {path: since for path, since in self._since.items() if path in objects}

    def find(self, wanted: Iterable[str]) -> tuple[set[str], bool]:
        """Try to prove chunks, in this order; return which are wrong on the remote, and whether
        there is more to do at once. May take long.

        Raises RemoteError when the remote cannot be reached.
        """
        remote, now, left = self._remote().anchor(), time.monotonic(), READS_A_ROUND
        kind, hosted = remote.hash_kind(), remote.profile() is BRIDGE
        wrong: set[str] = set()
        for path in wanted:
            digest = self._digest(path, kind) if path not in self._no_hash else ""
            waited = now - self._since.setdefault(path, now)
            silent = now - self._heard()
            step = next_step(has_hash=bool(digest), hosted=hosted, waited=waited, silent=silent)
            if step is Step.WAIT:
                continue
            if step is Step.READ:
                if left == 0:
                    return wrong, True
                left -= 1
            try:
                right = self._ask(remote, path, kind, digest) if digest else self._read(path)
            except NotFound:
                continue  # not listed yet, or not copied there; what is lost is made again
            if right is False and self._is_lasting(path, copied=remote is not self._remote()):
                wrong.add(path)
        return wrong, False

    def _is_lasting(self, path: str, *, copied: bool) -> bool:
        """Whether a chunk that is not whole is so for good, and not on its way there."""
        since = self._not_whole.setdefault(path, time.monotonic())
        if copied and time.monotonic() - since < COPY_SECONDS:
            return False
        del self._not_whole[path]
        return True

    def _digest(self, path: str, kind: str) -> str:
        """The hash of a chunk as it was sent; "" when it is not known."""
        if kind == "sha256":
            return parse(path)[1].sha256
        row = self._state.row("SELECT digest FROM proofs WHERE object = ?", path)
        known, _, digest = str(row[0]).partition(":") if row else ("", "", "")
        return digest if kind and known == kind else ""

    def _ask(self, remote: Remote, path: str, kind: str, digest: str) -> bool | None:
        """Whether the remote's hash of a chunk is right; None when it has none after all."""
        found = remote.hash_of(path, kind)
        if not found:
            self._no_hash.add(path)
            return None
        if found == digest:
            self.note([path], f"the remote's {kind}")
        return found == digest

    def _read(self, path: str) -> bool:
        _, name = parse(path)
        target = temporary_beside(self._scratch / str(name))
        try:
            self._remote().anchor().download(path, target, length=name.length)
            with open(target, "rb") as file:
                right = hashlib.file_digest(file, "sha256").hexdigest() == name.sha256
        except DataError:
            return False
        finally:
            target.unlink(missing_ok=True)
        if right:
            self.note([path], READ_BACK)
        return right
