"""Segments of growing files that the other end has not acknowledged.

A pack that carries log bytes can only go once they are acknowledged, or lie elsewhere. When a
state takes the place of packs, what they carried of logs is joined into chunks, as it lies in the
files, and the state names those. Each byte is put into a chunk at most once.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Collection, Iterator
from dataclasses import asdict
from pathlib import Path

from protocol.messages import Append, Piece
from protocol.schema import decode
from protocol.wire import CHUNK_BYTES
from syncd.delivery.link import LITTLE_BYTES
from syncd.delivery.streams import read_segment
from syncd.log_parts import is_log, rotated
from syncd.state import State

log = logging.getLogger("syncd")


class Unacked:
    """What was sent of growing files and is not acknowledged. `root` is the shared folder."""

    def __init__(self, state: State, root: Path) -> None:
        self._state = state
        self._root = root

    def note(self, seq: int, appends: list[Append]) -> None:
        """Remember which segments pack `seq` carries. Call it inside a transaction."""
        for append in appends:
            self._state.run(
                "INSERT INTO marks VALUES (?, ?, ?, ?)",
                seq,
                append.path,
                append.stream,
                append.end,
            )

    def size(self, acked: int) -> int:
        """Return how many bytes were sent and are not acknowledged, nor in a chunk."""
        return sum(end - start for _, _, start, end in self._segments(acked))

    def pack_up(self, acked: int, put_chunk: Callable[[bytes], str]) -> None:
        """Forget what was acknowledged, and bring the rest to the remote as chunks."""
        with self._state.transaction():
            self._forget(acked)
        if self.size(acked) <= LITTLE_BYTES:
            return  # a state repeats so little itself
        for path, stream, start, end in self._segments(acked):
            for at, data in self._read(path, stream, start, end, CHUNK_BYTES):
                piece = Piece(object=put_chunk(data), offset=0, length=len(data))
                message = Append(
                    path=path, stream=stream, start=at, end=at + len(data), pieces=(piece,)
                )
                self._state.run(
                    "INSERT INTO tail_chunks VALUES (?, ?, ?, ?)",
                    path,
                    stream,
                    message.end,
                    json.dumps({**asdict(message), "blob": None}),
                )

    def restate(self) -> list[Append]:
        """Return everything that is not acknowledged: chunks, and what came after them, inline."""
        rows = self._state.rows("SELECT message FROM tail_chunks ORDER BY rowid")
        messages = [_decode(text) for (text,) in rows]
        for path, stream, start, end in self._segments(int(self._state.get("acked_tails", 0))):
            messages += [
                Append(path=path, stream=stream, start=at, end=at + len(data), blob=data)
                for at, data in self._read(path, stream, start, end, CHUNK_BYTES)
            ]
        return messages

    def lose(self, lost: Collection[str]) -> None:
        """Forget these chunks, and those after them, so that their bytes are packed up again."""
        for path, stream, end, text in self._state.rows(
            "SELECT path, stream, end, message FROM tail_chunks"
        ):
            if any(piece.object in lost for piece in _decode(text).pieces):
                self._state.run(
                    "DELETE FROM tail_chunks WHERE path = ? AND stream = ? AND end >= ?",
                    path,
                    stream,
                    end,
                )

    def objects(self) -> set[str]:
        """Return the chunks that hold segments, as pieces name them."""
        rows = self._state.rows("SELECT message FROM tail_chunks")
        return {piece.object for (text,) in rows for piece in _decode(text).pieces}

    def _forget(self, acked: int) -> None:
        rows = self._state.rows(
            "SELECT path, stream, MAX(end) FROM marks WHERE seq <= ? GROUP BY path, stream", acked
        )
        for path, stream, end in rows:
            self._state.run(
                "DELETE FROM tail_chunks WHERE path = ? AND stream = ? AND end <= ?",
                path,
                stream,
                end,
            )
            # The newest acknowledged mark stays: it says where the rest begins.
            self._state.run(
                "DELETE FROM marks WHERE path = ? AND stream = ? AND seq <= ? AND end < ?",
                path,
                stream,
                acked,
                end,
            )
        self._state.put("acked_tails", acked)

    def _segments(self, acked: int) -> Iterator[tuple[str, str, int, int]]:
        """Yield (path, stream, start, end) of what is neither acknowledged nor in a chunk."""
        rows = self._state.rows(
            "SELECT m.path, m.stream,"
            " MAX(CASE WHEN m.seq <= ? THEN m.end ELSE 0 END), MAX(m.end),"
            " (SELECT COALESCE(MAX(c.end), 0) FROM tail_chunks c"
            "  WHERE c.path = m.path AND c.stream = m.stream)"
            " FROM marks m GROUP BY m.path, m.stream ORDER BY MIN(m.rowid)",
            acked,
        )
        for path, stream, done, end, chunked in rows:
            start = max(int(done), int(chunked))
            if start < int(end):
                yield str(path), str(stream), start, int(end)

    def _read(
        self, path: str, stream: str, start: int, end: int, step: int
    ) -> Iterator[tuple[int, bytes]]:
        """Yield bytes of a stream from its file, with where they begin.

        What is gone, or cannot be read, is left out, and shows as a gap.
        """
        row = self._state.row("SELECT inode FROM tails WHERE path = ? AND stream = ?", path, stream)
        for file in (self._root / path, rotated(self._root / path)):
            try:
                if row is None or file.lstat().st_ino != int(row[0]):
                    continue
                with open(file, "rb") as opened:
                    data = b"begin"
                    while data and start < end:
                        start, data = read_segment(opened, start, end, step, log_file=is_log(path))
                        if data:
                            yield start, data
                        start += len(data)
            except FileNotFoundError:
                continue
            except OSError as error:
                log.warning("%s: %s", file, error.strerror)


def _decode(text: str) -> Append:
    value = json.loads(text)
    value.pop("blob")
    return decode(Append, value)
