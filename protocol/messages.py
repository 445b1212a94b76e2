"""The messages that packs and states carry, and how a payload holds them.

A payload is one line of JSON, the list of messages, and then their blobs one after the other:

    [{"type": "append", "path": "in/pretrain.log", ..., "blob": 512}, ...]\\n<512 bytes>...

Applying a message twice must do what applying it once does; a reader may see it twice.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

from protocol.journal import JournalRecord
from protocol.results import RunRecord
from protocol.schema import decode, dumps, loads

MAX_MESSAGES = 1_000_000


_URL = re.compile(r"https?://[^\s/@?#]+(/[^\s@?#]*)?\Z")
_SHA256 = re.compile(r"[0-9a-f]{64}\Z")


def _check_file(size: int, mode: int, sha256: str) -> None:
    if not _SHA256.match(sha256):
        raise ValueError("sha256 is not 64 hexadecimal digits")
    if size < 0 or not 0 <= mode <= 0o7777:
        raise ValueError("size or mode is out of range")


@dataclass(frozen=True, kw_only=True)
class Hello:
    """A writer's first message: who it is, and up to which pack of each predecessor it read.

    What a predecessor wrote after that does not count.
    """

    type: ClassVar[str] = "hello"
    host: str
    version: str
    time: float
    inherits: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class QueuedCommand:
    """Controller: a new line of the queue.

    `snapshot` is the order of the newest snapshot when the line was found; `error` is why it can
    not be run, when it cannot; `unsealed` that it stood in the plain queue of the remote's root,
    where whoever can write to the remote may have put it.
    """

    type: ClassVar[str] = "command"
    number: int
    line: str
    run_id: str = ""
    snapshot: int = 0
    error: str = ""
    unsealed: bool = False

    def __post_init__(self) -> None:
        if self.number < 1 or self.snapshot < 0:
            raise ValueError("commands count from 1, and snapshots too")


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """A part of a content: `length` bytes from `offset` of the payload of `object`.

    `object` is `<writer>/<object name>` of a chunk.
    """

    object: str
    offset: int
    length: int

    def __post_init__(self) -> None:
        if self.offset < 0 or self.length < 0:
            raise ValueError("offset or length is below 0")


@dataclass(frozen=True, kw_only=True, slots=True)
class Content:
    """Bytes by their SHA-256, in the blob or, in `pieces`, in chunks that are there already."""

    type: ClassVar[str] = "content"
    sha256: str
    size: int
    pieces: tuple[Piece, ...] = ()
    blob: bytes = b""

    def __post_init__(self) -> None:
        _check_file(self.size, 0, self.sha256)


@dataclass(frozen=True, kw_only=True, slots=True)
class FileEntry:
    """A file: path, size in bytes, permission bits, SHA-256 of its content."""

    path: str
    size: int
    mode: int
    sha256: str

    def __post_init__(self) -> None:
        _check_file(self.size, self.mode, self.sha256)


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """Controller: serve/ as a whole, at one moment.

    `order` counts up with every change, `id` is the hash of the list of files, which is JSON in
    the blob (it can be long).
    """

    type: ClassVar[str] = "snapshot"
    order: int
    id: str
    blob: bytes = b""

    def __post_init__(self) -> None:
        if self.order < 1:
            raise ValueError("snapshots count from 1")


@dataclass(frozen=True, kw_only=True)
class PutFile:
    """Worker: a file below `in/` or `store/` is now this; its content came before.

    Of a checkpoint: it is in its run's groups from `first` on, up to `until` if that is not 0.
    """

    type: ClassVar[str] = "put"
    path: str
    size: int
    mode: int
    sha256: str
    first: int = 0
    until: int = 0

    def __post_init__(self) -> None:
        _check_file(self.size, self.mode, self.sha256)
        if self.first < 0 or self.until < 0 or 0 < self.until < self.first:
            raise ValueError("no groups are numbered so")


@dataclass(frozen=True, kw_only=True)
class CheckpointsGrouped:
    """Worker: all `files` files of a run's group of checkpoints were said."""

    type: ClassVar[str] = "group"
    run_id: str
    number: int
    files: int

    def __post_init__(self) -> None:
        if self.number < 1 or self.files < 1:
            raise ValueError("groups count from 1, and so do their files")


@dataclass(frozen=True, kw_only=True)
class DropFile:
    """Worker: a file below `in/` or `store/` is gone."""

    type: ClassVar[str] = "drop"
    path: str


@dataclass(frozen=True, kw_only=True)
class Append:
    """Worker: bytes `start` to `end` of a growing file, less the redraws of a terminal.

    `stream` names the file's incarnation; a new one begins at 0 and is joined on. In a state, the
    bytes may lie in `pieces`, redraws and all.
    """

    type: ClassVar[str] = "append"
    path: str
    stream: str
    start: int
    end: int
    pieces: tuple[Piece, ...] = ()
    blob: bytes = b""

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.end or len(self.blob) > self.end - self.start:
            raise ValueError("not a segment: start, end and bytes do not fit")


@dataclass(frozen=True, kw_only=True)
class Journal:
    """Worker: one record of the journal."""

    type: ClassVar[str] = "journal"
    record: JournalRecord


@dataclass(frozen=True, kw_only=True)
class RunEnded:
    """Worker: one run's entry of `results.json`."""

    type: ClassVar[str] = "run"
    record: RunRecord


@dataclass(frozen=True, kw_only=True)
class StatusReport:
    """Worker: the heartbeat; `status` is protocol.status.Status as JSON."""

    type: ClassVar[str] = "status"
    status: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class BridgeUrl:
    """Controller: where its file bridge is to be reached from now on; without credentials."""

    type: ClassVar[str] = "bridge"
    url: str

    def __post_init__(self) -> None:
        if not _URL.match(self.url):
            raise ValueError("not the URL of a folder")


@dataclass(frozen=True, kw_only=True)
class Ack:
    """Either end: every pack of `writer`, which counts, up to `seq` was applied, durably.

    Another incarnation of the other end that hears it knows that `writer` was heard: it is fenced
    by a newer one, and may not take for undone what an older one, that it cannot read, may have
    done.
    """

    type: ClassVar[str] = "ack"
    writer: str
    seq: int


@dataclass(frozen=True, kw_only=True)
class Stored:
    """Controller: these chunks of the worker lie whole on its own disk, durably.

    `objects` are `<writer>/<object name>`. Said only where the remote that outlives the others is
    on that disk.
    """

    type: ClassVar[str] = "stored"
    objects: tuple[str, ...]


Message = (
    Hello
    | QueuedCommand
    | Content
    | Snapshot
    | PutFile
    | CheckpointsGrouped
    | DropFile
    | Append
    | Journal
    | RunEnded
    | StatusReport
    | BridgeUrl
    | Stored
    | Ack
)
_TYPES: dict[str, type[Any]] = {t.type: t for t in Message.__args__}


def encode_messages(messages: Iterable[Message]) -> bytes:
    """Return the payload of a pack or a state, each drawn when its turn comes: there may be very
    many."""
    head = [b"["]
    blobs: list[bytes] = []
    for message in messages:
        value = {"type": message.type, **asdict(message)}
        blob = value.pop("blob", b"")
        if blob:
            value["blob"] = len(blob)
            blobs.append(blob)
        head += [dumps(value), b","]
    if len(head) > 1:
        head.pop()
    return b"".join([*head, b"]\n", *blobs])


def said_again(payload: bytes) -> bytes:
    """Return another payload of the same messages, which makes an object of another name."""
    line, newline, blobs = payload.partition(b"\n")
    return line + b" " + newline + blobs


def decode_messages(payload: bytes) -> list[Message]:
    """Read a payload. Messages of unknown types (a newer writer) are passed over.

    Raises ValueError when it is malformed.
    """
    line, newline, rest = payload.partition(b"\n")
    head = loads(line)
    if not newline or not isinstance(head, list) or len(head) > MAX_MESSAGES:
        raise ValueError("not a list of messages")
    messages: list[Message] = []
    at = 0
    head.reverse()
    while head:
        value = head.pop()  # not held any longer: there may be very many
        if not isinstance(value, dict):
            raise ValueError("a message is not an object")
        length = value.pop("blob", 0)
        if (
            not isinstance(length, int)
            or isinstance(length, bool)
            or not 0 <= length <= len(rest) - at
        ):
            raise ValueError("a blob is longer than the payload")
        blob, at = rest[at : at + length], at + length
        kind = _TYPES.get(str(value.pop("type", "")))
        if kind is not None:
            messages.append(decode(kind, {**value, "blob": blob} if length else value))
    if at != len(rest):
        raise ValueError("bytes are left over")
    return messages
