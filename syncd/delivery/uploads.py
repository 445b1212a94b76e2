"""Files on their way to the remote as chunks: large ones cut up, small ones several to one.

The hash of a file is taken of the very bytes that go into chunks: one that changed since it was
looked at is never taken for what it was.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from io import BufferedReader
from pathlib import Path
from typing import Any, Protocol

from protocol.errors import DataError
from protocol.messages import Piece
from protocol.wire import CHUNK_BYTES
from syncd.delivery.chunks import Draft, blocks_of

# Up to this size a file goes into a chunk with others, whole.
SMALL_BYTES = CHUNK_BYTES // 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """A file, whose first `size` bytes have this hash."""

    path: Path
    sha256: str
    size: int
    awaited: bool = False  # whether the other end is going to fetch it as soon as it can


@dataclass(frozen=True, slots=True)
class Part:
    """The bytes of a source from `at` on, and where they lie in a chunk."""

    source: Source
    at: int
    offset: int
    length: int
    chunk: str = ""

    @property
    def piece(self) -> Piece:
        return Piece(object=self.chunk, offset=self.offset, length=self.length)


class Sender(Protocol):
    """What brings chunks to the remote; see `syncd.delivery.chunks.Chunks`."""

    def begin(self, again: str = "") -> Draft: ...

    def send_all(self, drafts: Iterable[Draft]) -> Iterator[str]: ...


class Upload:
    """One upload of many files."""

    def __init__(self, sender: Sender, begun: Callable[[str], Sequence[Piece]]) -> None:
        """`begun` returns, by its hash, what pieces of a file an earlier upload came to."""
        self._sender = sender
        self._begun = begun
        self._parts: deque[list[Part]] = deque()
        self._taken: set[str] = set()
        self.failed: dict[Path, OSError | DataError] = {}

    def run(self, sources: Iterable[Source]) -> Iterator[list[Part]]:
        """Yield what each chunk that is on the remote now holds; a large file's parts in order.

        A file of which all parts came is what its hash says. What fails is in `failed`.
        """
        for name in self._sender.send_all(self._drafts(sources)):
            yield [replace(part, chunk=name) for part in self._parts.popleft()]

    def _drafts(self, sources: Iterable[Source]) -> Iterator[Draft]:
        """Yield chunks that are ready to be sent; `_parts` says what they hold."""
        shared: _Shared | None = None
        for source in sources:
            if source.sha256 in self._taken:
                continue
            if shared and not shared.has_room_for(source.size):
                full, shared = shared, None
                yield self._ready(full.draft, *full.parts)
            try:
                if source.size > SMALL_BYTES:
                    yield from self._slices(source)
                else:
                    shared = shared or _Shared(self._sender.begin())
                    shared.add(source)
            except (OSError, DataError) as error:
                self.failed[source.path] = error
            else:
                self._taken.add(source.sha256)
        if shared:
            yield self._ready(shared.draft, *shared.parts)

    def _ready(self, draft: Draft, *parts: Part) -> Draft:
        self._parts.append(list(parts))
        return draft

    def _slices(self, source: Source) -> Iterator[Draft]:
        digest, at = hashlib.sha256(), 0
        begun = deque(self._begun(source.sha256))
        with open(source.path, "rb") as file:
            while at < source.size:
                again = begun.popleft().object if begun else ""
                length = min(CHUNK_BYTES, source.size - at)
                draft = self._sender.begin(again)
                _fill(draft, file, length, digest)
                at += length
                whole = at < source.size or digest.hexdigest() == source.sha256
                if draft.length < length or not whole:
                    draft.discard()
                    raise changed("send a file", source.path)
                if draft.name == again:
                    draft.discard()  # it is there already
                    continue
                begun.clear()
                yield self._ready(draft, Part(source, at - length, 0, length))


class _Shared:
    """A chunk of several files."""

    def __init__(self, draft: Draft) -> None:
        self.draft = draft
        self.parts: list[Part] = []

    def has_room_for(self, size: int) -> bool:
        return size > SMALL_BYTES or self.draft.length + size <= CHUNK_BYTES

    def add(self, source: Source) -> None:
        """Append a file. Raises OSError, or DataError when it is not what its hash says; what was
        read of it then lies in the chunk, and nothing names it."""
        digest, offset = hashlib.sha256(), self.draft.length
        with open(source.path, "rb") as file:
            _fill(self.draft, file, source.size, digest)
        if self.draft.length - offset < source.size or digest.hexdigest() != source.sha256:
            raise changed("send a file", source.path)
        self.parts.append(Part(source, 0, offset, source.size))


def _fill(draft: Draft, file: BufferedReader, length: int, digest: Any) -> None:
    try:
        for block in blocks_of(file, length):
            digest.update(block)
            draft.write(block)
    except BaseException:
        draft.discard()
        raise


def changed(doing: str, path: Path) -> DataError:
    """Return the error of a file that is no longer what it was when it was looked at."""
    return DataError(doing, path=path, why="it changed meanwhile")
