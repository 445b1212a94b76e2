"""Chunks: the bytes of larger contents as objects, several on their way at a time.

They go by way of files in the scratch folder, which rclone reads and writes, and a remote on this
disk takes and gives as they are: so of a chunk that is fetched only a block is in memory at a time.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from io import BufferedReader
from pathlib import Path
from typing import Self

from protocol.errors import RefusedError
from protocol.messages import Piece
from protocol.publish import temporary_beside
from protocol.wire import Kind, ObjectName, Writer, compressed
from syncd.delivery.ahead import ahead
from syncd.delivery.keyring import Keyring
from syncd.rclone.remote import Remote
from syncd.state import State

BLOCK_BYTES = 256 * 1024

Block = bytes | memoryview


class Draft:
    """A chunk in the making: its header, and the bytes written so far, in a file.

    As a context, it is finished and, in the end, its file removed.
    """

    def __init__(
        self, beside: Path, writer: Writer, seq: int, header: bytes, kind: str = ""
    ) -> None:
        """`kind` is another hash that is wanted of all of it, by hashlib's name."""
        self.file = temporary_beside(beside)
        self.length = 0  # of the payload
        self._writer = writer
        self._seq = seq
        self._digest = hashlib.sha256(header)
        self._other = hashlib.new(kind, header, usedforsecurity=False) if kind else None
        self._header_length = len(header)
        self._open = open(self.file, "wb")
        self._open.write(header)

    def write(self, block: Block) -> None:
        """Append bytes to the payload. Raises OSError."""
        self._digest.update(block)
        if self._other:
            self._other.update(block)
        self._open.write(block)
        self.length += len(block)

    @property
    def other_digest(self) -> str:
        """The other hash that was wanted, as `kind:hexadecimal`; "" for none."""
        return f"{self._other.name}:{self._other.hexdigest()}" if self._other else ""

    @property
    def name(self) -> str:
        """The name that a piece gives the chunk, as it is now."""
        length = self._header_length + self.length
        name = ObjectName(self._seq, Kind.CHUNK, length, self._digest.hexdigest())
        return f"{self._writer}/{name}"

    def __enter__(self) -> Self:
        self._open.close()
        return self

    def __exit__(self, *error: object) -> None:
        self.discard()

    def discard(self) -> None:
        """Remove the file."""
        self._open.close()
        self.file.unlink(missing_ok=True)


class Chunks:
    """Those of one end. Safe to use from several threads."""

    def __init__(
        self,
        *,
        remote: Callable[[], Remote],
        state: State,
        keys: Keyring,
        writer: Callable[[], Writer],
        scratch: Path,
    ) -> None:
        self._remote = remote
        self._state = state
        self._keys = keys
        self._writer = writer
        self._scratch = scratch

    # Writing

    def put(self, payload: bytes, *, compress: bool = False) -> str:
        """Upload bytes as a chunk; return the name that a piece gives it."""
        codec, payload = compressed(payload) if compress else ("raw", payload)
        draft = self._begin(self._writer(), self._next_seq(), codec)
        draft.write(payload)
        return self.send(draft)

    def begin(self, again: str = "") -> Draft:
        """Begin a chunk that is not compressed: with the number of the chunk `again`, if given."""
        writer = self._writer()
        own = again.startswith(f"{writer}/")
        return self._begin(writer, parse(again)[1].seq if own else self._next_seq(), "raw")

    def _begin(self, writer: Writer, seq: int, codec: str) -> Draft:
        header = self._keys.sealer.chunk_header(writer, seq, codec)
        kind = self._remote().hash_kind()
        # The name has the SHA-256 of it.
        kind = "" if kind == "sha256" else kind
        return Draft(self._scratch / f"{seq:012d}-chunk", writer, seq, header, kind)

    def send(self, draft: Draft) -> str:
        """Upload a chunk whose bytes are all written; return the name that a piece gives it."""
        with draft:
            self._remote().upload(draft.file, draft.name)
        if draft.other_digest:
            self._state.run(
                "INSERT OR REPLACE INTO proofs (object, digest) VALUES (?, ?)",
                draft.name,
                draft.other_digest,
            )
        return draft.name

    def send_all(self, drafts: Iterable[Draft]) -> Iterator[str]:
        """As `send`, for many, several at a time; yields the names in order."""
        begun: deque[Draft] = deque()

        def drawn() -> Iterator[Draft]:
            for draft in drafts:
                begun.append(draft)
                yield draft

        try:
            for name in ahead(self.send, drawn(), most=self._remote().profile().transfers):
                begun.popleft()
                yield name
        finally:
            for draft in begun:
                draft.discard()

    def _next_seq(self) -> int:
        with self._state.transaction():
            seq = int(self._state.get("chunk_seq")) + 1
            self._state.put("chunk_seq", seq)
        return seq

    # Reading

    def read(self, pieces: Iterable[Piece], *, trusting: bool = False) -> Iterator[Block]:
        """Yield the bytes of pieces in order; the next chunks are fetched meanwhile.

        The hash in a chunk's name is checked, unless the caller is `trusting`: then it must check
        the hash of what it makes of the bytes before it uses them, and gets them in blocks, each of
        which it must use before it asks for the next.

        Raises NotFound when a chunk is not there, DataError when it is not whole, RefusedError when
        it is not what it should be.
        """
        groups = [(path, list(group)) for path, group in itertools.groupby(pieces, _path_of)]
        paths = [path for path, _ in groups]
        made: list[Path] = []
        fetched = ahead(partial(self._fetch, made), paths, most=self._remote().profile().transfers)
        try:
            for (path, group), source in zip(groups, fetched, strict=True):
                yield from self._blocks(path, group, source, trusting)
                source.unlink()
        finally:
            fetched.close()
            for source in made:
                source.unlink(missing_ok=True)

    def _fetch(self, made: list[Path], path: str) -> Path:
        """Bring a chunk to this disk; return where it is, and add that to `made` before."""
        _, name = parse(path)
        target = temporary_beside(self._scratch / str(name))
        made.append(target)
        self._remote().download(path, target, length=name.length)
        return target

    def _blocks(
        self, path: str, pieces: Sequence[Piece], source: Path, trusting: bool
    ) -> Iterator[Block]:
        writer, name = parse(path)
        with open(source, "rb") as file:
            header = self._keys.sealer.chunk_header(writer, name.seq)
            if trusting and file.read(len(header)) == header:
                for piece in pieces:
                    file.seek(len(header) + _checked(path, piece, name.length - len(header)))
                    yield from blocks_of(file, piece.length)
                return
            file.seek(0)
            # Kept in memory between being checked and being used: others may have the file open.
            payload = self._keys.sealer.open(writer, name, file.read(name.length + 1))
            for piece in pieces:
                offset = _checked(path, piece, len(payload))
                yield payload[offset : offset + piece.length]


def blocks_of(file: BufferedReader, length: int) -> Iterator[memoryview]:
    """Yield the next bytes of a file, as many as there are of `length`.

    Each block is to be used before the next is asked for, which takes its place in memory: what is
    new there costs about as much as hashing it.
    """
    buffer = memoryview(bytearray(min(length, BLOCK_BYTES)))
    while length > 0 and (count := file.readinto(buffer[:length])):
        length -= count
        yield buffer[:count]


def _path_of(piece: Piece) -> str:
    return piece.object


def parse(path: str) -> tuple[Writer, ObjectName]:
    """Return whose chunk a piece names, and its name. Raises RefusedError when it names none."""
    folder, _, file = path.partition("/")
    writer, name = Writer.parse(folder), ObjectName.parse(file)
    if writer is None or name is None or name.kind is not Kind.CHUNK:
        raise RefusedError("read a chunk", path=path[:200], why="not the name of a chunk")
    return writer, name


def _checked(path: str, piece: Piece, length: int) -> int:
    """Return where a piece lies in a payload of this length. Raises RefusedError."""
    if piece.offset < 0 or not 0 <= piece.length <= length - piece.offset:
        raise RefusedError("read a chunk", path=path, why="a piece lies outside of it")
    return piece.offset
