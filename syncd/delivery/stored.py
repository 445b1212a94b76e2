"""The controller's word for chunks of the worker that it has on its own disk.

Where the controller's remote is a folder there (the bridge serves it), it hashes what holds the
worker's checkpoints: so the worker need not fetch it again to know that it is whole.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from protocol.checkpoints import CHECKPOINTS
from protocol.messages import Stored
from protocol.wire import ObjectName
from syncd.delivery.proofs import hash_of_file
from syncd.state import State

# In the state: chunks that are whole, and how many of them, the first, were said.
STORED, SAID = "stored chunks", "stored chunks said"
# In SQL: the chunks that hold the worker's checkpoints, as far as was heard.
_HOLDING = (
    "SELECT DISTINCT json_extract(value, '$.object') FROM remote_files"
    " JOIN contents USING (sha256), json_each(pieces)"
    " WHERE remote_files.path >= ? AND remote_files.path < ? ORDER BY 1"
)


class StoredChunks:
    """What this controller has found to be whole. One thread looks, another collects."""

    def __init__(self, state: State) -> None:
        self._state = state

    def look(self, folder: Path) -> bool:
        """Hash what is new of the worker's checkpoints below `folder`, the remote; may take long.

        Returns whether there is something to be said. What is missing or damaged is passed over:
        it may be arriving, and the worker hears nothing of it.
        """
        below = CHECKPOINTS.removesuffix("/")
        holding = [str(c) for (c,) in self._state.rows(_HOLDING, f"{below}/", f"{below}0")]
        known = set(self._state.get(STORED, []))
        whole = [chunk for chunk in holding if chunk not in known and _is_whole(folder, chunk)]
        with self._state.transaction():
            kept, said = self._split(set(holding))
            self._state.put(STORED, [*kept, *whole])
            self._state.put(SAID, said)
        return said < len(kept) + len(whole)

    def _split(self, needed: set[str]) -> tuple[list[str], int]:
        """Return what is known and still needed, and how many of these were said."""
        known, said = self._state.get(STORED, []), int(self._state.get(SAID, 0))
        kept = [chunk for chunk in known if chunk in needed]
        return kept, sum(chunk in needed for chunk in known[:said])

    def collect(self) -> list[Stored]:
        """Return the message for what was not said yet. Call it inside a transaction."""
        known, said = self._state.get(STORED, []), int(self._state.get(SAID, 0))
        if said == len(known):
            return []
        self._state.put(SAID, len(known))
        return [Stored(chunks=tuple(known[said:]))]

    def restate(self) -> Iterable[Stored]:
        """Return the message for all that was said."""
        said = self._state.get(STORED, [])[: int(self._state.get(SAID, 0))]
        return [Stored(chunks=tuple(said))] if said else []


def _is_whole(folder: Path, chunk: str) -> bool:
    name = ObjectName.parse(chunk.rpartition("/")[2])
    try:
        return name is not None and hash_of_file(folder / chunk) == name.sha256
    except OSError:
        return False
