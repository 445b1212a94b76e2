"""Whether chunks of this end are really on the remote, as they were sent.

An upload that was reported as done may have come to nothing. What vouches for a chunk is the
remote's own hash of it; or the controller, where it has the remote on its disk; or, where neither
is to be had, the bytes themselves, fetched again. What was found is kept in the state.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Collection, Iterable
from pathlib import Path

from protocol.checkpoints import Proof
from protocol.errors import DataError
from protocol.publish import temporary_beside
from protocol.wire import ObjectName
from syncd.rclone.remote import NotFound, Remote
from syncd.state import State

log = logging.getLogger("syncd")

# How long the word of a controller that has the remote on its disk is waited for: to fetch a chunk
# again costs the line of the laptop, and is done when it stays silent.
PATIENCE_SECONDS = 600.0


def proof_to_seek(*, hashed: bool, vouched: bool, waited: float) -> Proof | None:
    """Return how to find out whether a chunk is whole; None to wait for the controller's word.

    `hashed`: the remote takes a hash that is known of the chunk. `vouched`: the controller has the
    remote on its disk and looks for itself. `waited`: for how many seconds the chunk was there.
    """
    if hashed:
        return Proof.HASH
    if vouched and waited < PATIENCE_SECONDS:
        return None
    return Proof.READ_BACK


class Proofs:
    """Those of one end. Safe to use from several threads, of which one checks."""

    def __init__(self, state: State, remote: Callable[[], Remote], scratch: Path) -> None:
        self._state = state
        self._remote = remote
        self._scratch = scratch
        self._met: dict[str, float] = {}  # chunks that wait, and since when

    def note(self, chunks: Iterable[str], proof: Proof) -> None:
        """Take chunks for whole. The first proof of a chunk stays."""
        with self._state.transaction():
            for chunk in chunks:
                self._state.run("INSERT OR IGNORE INTO sums (chunk) VALUES (?)", chunk)
                self._state.run(
                    "UPDATE sums SET proof = ?, since = ? WHERE chunk = ? AND proof = ''",
                    str(proof),
                    time.time(),
                    chunk,
                )

    def of(self, chunk: str) -> tuple[Proof, float] | None:
        """Return how, and since when, a chunk is known to be whole; None when it is not."""
        row = self._state.row("SELECT proof, since FROM sums WHERE chunk = ?", chunk)
        return (Proof(row[0]), float(row[1])) if row and row[0] else None

    def check(self, chunks: Iterable[str]) -> set[str]:
        """Look for those of these chunks that are not proved yet; return which are damaged.

        May take long. Raises RemoteError when the remote cannot be reached.
        """
        damaged = set()
        waiting = [chunk for chunk in chunks if self.of(chunk) is None]
        now = time.monotonic()
        self._met = {chunk: self._met.get(chunk, now) for chunk in waiting}
        for chunk in waiting:
            if self._is_damaged(chunk, now - self._met[chunk]):
                log.warning("%s is not on the remote as it was sent: it is sent again", chunk)
                damaged.add(chunk)
        return damaged

    def _is_damaged(self, chunk: str, waited: float) -> bool:
        """Look whether a chunk is whole, and note it if so; return whether it surely is not."""
        remote = self._remote()
        kind, expected = remote.hash_type(), self._expected(chunk, remote.hash_type())
        vouched = remote.profile().vouched
        proof = proof_to_seek(hashed=bool(expected), vouched=vouched, waited=waited)
        if proof is None:
            return False
        try:
            found = remote.hash_of(chunk, kind) if proof is Proof.HASH else ""
            if not found:  # the remote has none of this file, or of any
                proof, expected = Proof.READ_BACK, _name(chunk).sha256
                found = self._read_back(chunk)
        except NotFound:
            return False  # listed late, or gone, which `Link.mend` finds out
        if found == expected:
            self.note([chunk], proof)
        return found != expected

    def _expected(self, chunk: str, kind: str) -> str:
        """Return the hash of this kind that a chunk must have; "" when it is not known."""
        if kind == "sha256":
            return _name(chunk).sha256
        row = self._state.row("SELECT sum FROM sums WHERE chunk = ? AND kind = ?", chunk, kind)
        return str(row[0]) if row else ""

    def _read_back(self, chunk: str) -> str:
        name = _name(chunk)
        target = temporary_beside(self._scratch / str(name))
        try:
            self._remote().download(chunk, target, length=name.length)
            return hash_of_file(target)
        except DataError:
            return "cut short"
        finally:
            target.unlink(missing_ok=True)

    def keep_only(self, chunks: Collection[str]) -> None:
        """Forget what is known of all others, which are not needed any more."""
        known = {str(chunk) for (chunk,) in self._state.rows("SELECT chunk FROM sums")}
        with self._state.transaction():
            for chunk in known - set(chunks):
                self._state.run("DELETE FROM sums WHERE chunk = ?", chunk)


def _name(chunk: str) -> ObjectName:
    name = ObjectName.parse(chunk.rpartition("/")[2])
    assert name is not None  # a piece of ours names it
    return name


def hash_of_file(path: Path) -> str:
    """Return the SHA-256 of a file that others may take away. Raises OSError."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
