"""One end's side of the wire: packs out, packs in, chunks both ways.

The same code serves both ends. What is sent comes from an `Outgoing`, which keeps its own cursors
in the state; what arrives goes to an `Incoming`. Each is called inside the transaction that also
makes the pack, or moves the reading cursor, so a crash repeats a step or never began it.
"""

from __future__ import annotations

import logging
import secrets
import socket
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Protocol

from protocol.errors import DataError, RefusedError
from protocol.messages import (
    Ack,
    Append,
    Hello,
    Message,
    Piece,
    decode_messages,
    encode_messages,
)
from protocol.publish import temporary_beside
from protocol.wire import Kind, ObjectName, Role, Sealer, Writer
from syncd.rclone.remote import NotFound, Remote
from syncd.state import State

log = logging.getLogger("syncd")

PACK_BUDGET = 2 * 1024 * 1024
# After so many packs a state takes their place, and they are deleted.
STATE_PACKS = 300
ACK_SECONDS = 1.0


class Outgoing(Protocol):
    """What this end has to say."""

    def collect(self, seq: int, budget: int) -> list[Message]:
        """Return what pack `seq` is to say, about `budget` bytes, and move the cursors past it.

        Called inside a transaction of the state that is taken back if the pack is not made.
        """

    def pack_up(self, acked: int) -> None:
        """Bring what a state would have to repeat to the remote as chunks; may take long.

        The other end has applied every pack up to `acked`.
        """

    def restate(self) -> list[Message]:
        """Return what stands for everything that was said, but for logs that were acknowledged.

        Called inside a transaction.
        """

    def kept_objects(self) -> set[str]:
        """Return the chunks that are still needed, as pieces name them."""


class Incoming(Protocol):
    """What this end does with what arrives."""

    def apply(self, writer: Writer, message: Message) -> None:
        """Apply one message, inside a transaction. It may come twice."""

    def restart(self, writer: Writer, messages: Sequence[Message]) -> None:
        """Forget what a writer said earlier and its state, which follows, does not repeat."""


class FencedError(RefusedError):
    """A newer incarnation of this end has taken over."""


class Link:
    """The connection of one end to the remote. `push` and `pull` may run in two threads."""

    def __init__(
        self,
        *,
        remote: Remote,
        state: State,
        sealer: Sealer,
        role: Role,
        scratch: Path,
        outgoing: Outgoing,
        incoming: Incoming,
    ) -> None:
        self.remote = remote
        self.state = state
        self.sealer = sealer
        self.role = role
        self.scratch = scratch
        self.outgoing = outgoing
        self.incoming = incoming
        self.refused: dict[str, str] = {}
        self._ack_due: float | None = None
        self._chunk_lock = threading.Lock()

    @property
    def writer(self) -> Writer:
        """This incarnation. Raises RuntimeError before `open`."""
        writer = Writer.parse(self.state.get("writer", ""))
        if writer is None:
            raise RuntimeError("the link is not open")
        return writer

    # Joining

    def open(self) -> None:
        """Find this end's identity, or take a new one after reading what its predecessors left.

        Raises FencedError when a newer incarnation is at work already.
        """
        if self.state.get("writer") is None:
            self._read_predecessors()
            newest = max((w.epoch for w in self._known(self.role)), default=0)
            writer = Writer(newest + 1, secrets.token_hex(4), self.role)
            with self.state.transaction():
                self.state.put("writer", str(writer))
                self.state.put("seq", 0)
                self.state.put("chunk_seq", 0)
        elif int(self.state.get("seq")) > 0 and not self._names(self.writer):
            # The remote is another one, or was emptied: what was said there has to be said again,
            # all at once, or the other end would wait for the first pack for ever.
            self.state.put("state_seq", int(self.state.get("seq")) - STATE_PACKS)
        self.discover()

    def _read_predecessors(self) -> None:
        """Apply everything that earlier incarnations of this end wrote."""
        self.discover()
        while self._pull_role(self.role):
            pass

    def _known(self, role: Role) -> list[Writer]:
        """Writers of a role that said a valid hello, oldest first."""
        found = [Writer.parse(row[0]) for row in self.state.rows("SELECT writer FROM peers")]
        return sorted(w for w in found if w is not None and w.role is role)

    def discover(self) -> None:
        """Look for writers that are new. Raises FencedError when one of our role supersedes us."""
        known = {row[0] for row in self.state.rows("SELECT writer FROM peers")}
        own = self.state.get("writer")
        for entry in self.remote.list(""):
            writer = Writer.parse(entry.name) if entry.is_dir else None
            if writer is None or entry.name in known or entry.name == own:
                continue
            hello = self._hello_of(writer)
            if hello is not None:
                self._admit(writer, hello)
        own_writer = Writer.parse(own) if own else None
        newer = [w for w in self._known(self.role) if own_writer and w > own_writer]
        if newer:
            raise FencedError(
                f"{self.role} {own}",
                why=f"{newer[-1]} has taken over this folder",
                hint="Stop the other one and remove .syncd/ here to take it back.",
            )

    def _hello_of(self, writer: Writer) -> Hello | None:
        names = sorted(self._names(writer))
        first = next((n for n in names if n.kind is Kind.STATE), None)
        for name in [first] if first else [n for n in names if n.kind is Kind.PACK and n.seq == 1]:
            for message in self._read(writer, name) or ():
                if isinstance(message, Hello):
                    return message
        return None

    def _admit(self, writer: Writer, hello: Hello) -> None:
        """Count a writer in, and settle how much of each older one of its role counts."""
        with self.state.transaction():
            older = [w for w in self._known(writer.role) if w < writer]
            newer = [w for w in self._known(writer.role) if w > writer]
            last = None
            for successor in newer[:1]:
                last = int(self.state.get(f"inherits {successor}", {}).get(str(writer), 0))
            self.state.put(f"inherits {writer}", dict(hello.inherits))
            self.state.run(
                "INSERT OR REPLACE INTO peers (writer, next, last) VALUES (?, 1, ?)",
                str(writer),
                last,
            )
            for predecessor in older[-1:]:
                counted = int(hello.inherits.get(str(predecessor), 0))
                self.state.run(
                    "UPDATE peers SET last = ? WHERE writer = ?", counted, str(predecessor)
                )

    def inherits(self) -> dict[str, int]:
        """Up to which pack each predecessor of this end was read."""
        rows = self.state.rows("SELECT writer, next FROM peers")
        read = {str(w): int(n) - 1 for w, n in rows}
        return {str(w): read[str(w)] for w in self._known(self.role)}

    def peer(self) -> Writer | None:
        """The incarnation of the other end that counts, or None when none was seen."""
        known = self._known(self.role.peer)
        return known[-1] if known else None

    # Reading

    def pull(self) -> bool:
        """Read and apply what is new from the other end; return whether anything was."""
        return self._pull_role(self.role.peer)

    def _pull_role(self, role: Role) -> bool:
        applied = False
        for writer in self._known(role):
            row = self.state.row("SELECT next, last FROM peers WHERE writer = ?", str(writer))
            assert row is not None
            following, last = int(row[0]), row[1]
            if last is not None and following > last:
                continue
            applied |= self._pull_writer(writer, following, last)
            row = self.state.row("SELECT next, last FROM peers WHERE writer = ?", str(writer))
            assert row is not None
            if row[1] is not None and int(row[0]) <= int(row[1]):
                break  # a successor's packs come after all that counts of this one
        return applied

    def _pull_writer(self, writer: Writer, following: int, last: int | None) -> bool:
        names = self._names(writer)
        packs: dict[int, list[ObjectName]] = {}
        for name in names:
            if name.kind is Kind.PACK:
                packs.setdefault(name.seq, []).append(name)
        applied = False
        for state in sorted((n for n in names if n.kind is Kind.STATE), reverse=True):
            # A state stands for every pack up to its number; only a reader behind needs it.
            behind = state.seq >= following and following not in packs
            if behind and self._apply_state(writer, state):
                following, applied = state.seq + 1, True
        while following in packs and (last is None or following <= last):
            if not self._apply(writer, packs[following], following):
                break
            following, applied = following + 1, True
        return applied

    def _names(self, writer: Writer) -> list[ObjectName]:
        """The objects in a writer's folder that have their full length."""
        found = []
        for entry in self.remote.list(str(writer)):
            name = None if entry.is_dir else ObjectName.parse(entry.name)
            if name is not None and entry.size in (name.length, -1):
                found.append(name)
        return found

    def _apply(self, writer: Writer, candidates: list[ObjectName], seq: int) -> bool:
        for name in candidates:
            messages = self._read(writer, name)
            if messages is None:
                continue
            with self.state.transaction():
                for message in messages:
                    self._take(writer, message)
                self._move_on(writer, seq + 1)
            if any(message.type not in ("ack", "status") for message in messages):
                self._ack_due = self._ack_due or time.monotonic() + ACK_SECONDS
            return True
        return False

    def _move_on(self, writer: Writer, following: int) -> None:
        self.state.run("UPDATE peers SET next = ? WHERE writer = ?", following, str(writer))

    def _take(self, writer: Writer, message: Message) -> None:
        if not isinstance(message, Ack):
            try:
                self.incoming.apply(writer, message)
            except RefusedError as error:
                # One bad message must not keep the good ones after it away for ever.
                self.refused[f"{writer} {message.type} {error.what}"] = str(error)
        elif message.writer == self.state.get("writer"):
            self.state.put("acked_by_peer", max(message.seq, self.acked()))

    def acked(self) -> int:
        """Up to which of our packs the other end has applied them."""
        return int(self.state.get("acked_by_peer", 0))

    def _apply_state(self, writer: Writer, name: ObjectName) -> bool:
        """Apply a state: message by message, since each may come twice and some fetch chunks."""
        messages = self._read(writer, name)
        if messages is None:
            return False
        with self.state.transaction():
            self.incoming.restart(writer, messages)
        for message in messages:
            if isinstance(message, Append) and message.pieces:
                blob = b"".join(self.read_pieces(message.pieces))
                message = replace(message, pieces=(), blob=blob)
            with self.state.transaction():
                self._take(writer, message)
        self._move_on(writer, name.seq + 1)
        self._ack_due = self._ack_due or time.monotonic() + ACK_SECONDS
        return True

    def _read(self, writer: Writer, name: ObjectName) -> list[Message] | None:
        """Read one object; None when it is not whole yet, gone, or refused (which is counted)."""
        path = f"{writer}/{name}"
        try:
            body = self.remote.read(path, limit=name.length)
            return decode_messages(self.sealer.open(writer, name, body))
        except (NotFound, DataError):
            return None
        except (RefusedError, ValueError) as error:
            if path not in self.refused:
                log.warning("%s", error)
            self.refused[path] = str(error)
            return None

    # Writing

    def push(self) -> bool:
        """Send one pack of what is new; return whether there was anything to send."""
        if not self.state.row("SELECT 1 FROM outbox") and not self._make_pack():
            return False
        for seq, name, body in self.state.rows("SELECT seq, name, body FROM outbox ORDER BY seq"):
            self._upload(name, body)
            self.state.run("DELETE FROM outbox WHERE seq = ?", seq)
        return True

    def _make_pack(self) -> bool:
        with self.state.transaction():
            seq = int(self.state.get("seq")) + 1
            messages = self.outgoing.collect(seq, PACK_BUDGET)
            if seq == 1:
                messages.insert(0, self._hello())
            messages += self._acks(forced=bool(messages))
            if not messages:
                return False
            payload = encode_messages(messages)
            name, body = self.sealer.seal(self.writer, Kind.PACK, seq, payload)
            self.state.put("seq", seq)
            self.state.run("INSERT INTO outbox VALUES (?, ?, ?)", seq, str(name), body)
        return True

    def _hello(self) -> Hello:
        return Hello(
            host=socket.gethostname(),
            version=version("syncd"),
            time=time.time(),
            inherits=self.inherits(),
        )

    def _acks(self, *, forced: bool) -> list[Message]:
        """Acknowledge what was applied: along with other messages, or a little later alone."""
        due = self._ack_due is not None and time.monotonic() >= self._ack_due
        writer = self.peer()
        if writer is None or not (forced or due):
            return []
        self._ack_due = None
        row = self.state.row("SELECT next FROM peers WHERE writer = ?", str(writer))
        seq = int(row[0]) - 1 if row else 0
        if [str(writer), seq] == self.state.get("acked"):
            return []
        self.state.put("acked", [str(writer), seq])
        return [Ack(writer=str(writer), seq=seq)]

    def _upload(self, name: str, body: bytes) -> None:
        source = temporary_beside(self.scratch / name)
        try:
            source.write_bytes(body)
            self.remote.upload(source, f"{self.writer}/{name}")
        finally:
            source.unlink(missing_ok=True)

    def unsent(self) -> int:
        """How many bytes of packs wait in the outbox."""
        row = self.state.row("SELECT COALESCE(SUM(LENGTH(body)), 0) FROM outbox")
        return int(row[0]) if row else 0

    # States

    def compact(self) -> bool:
        """Put a state in the place of many packs, and delete what is not needed any more.

        Call it from the thread that puts chunks. Returns whether there was enough to do it for.
        """
        if int(self.state.get("seq")) - int(self.state.get("state_seq", 0)) < STATE_PACKS:
            return False
        self.outgoing.pack_up(self.acked())
        with self.state.transaction():
            if self.state.row("SELECT 1 FROM outbox"):
                return False  # a pack is on its way: later
            seq = int(self.state.get("seq"))
            payload = encode_messages([self._hello(), *self.outgoing.restate()])
        name, body = self.sealer.seal(self.writer, Kind.STATE, seq, payload)
        self._upload(str(name), body)
        self.state.put("state_seq", seq)
        log.debug("state %d of %d bytes", seq, len(body))
        self._sweep(self.writer, seq, keep=str(name))
        # A predecessor's folder is needed until the other end has read it, which it does first.
        if self.acked() > 0:
            for older in self._known(self.role):
                self._sweep(older, None, keep="")
        return True

    def _sweep(self, writer: Writer, seq: int | None, keep: str) -> None:
        """Delete objects that a state of ours stands for: packs and states up to `seq`, chunks."""
        kept = self.outgoing.kept_objects()
        left = 0
        for name in self._names(writer):
            path = f"{writer}/{name}"
            needed = path in kept if name.kind is Kind.CHUNK else seq is not None and name.seq > seq
            if needed or str(name) == keep:
                left += 1
            else:
                self.remote.delete(path)
        if not left and writer != self.writer:
            self.remote.delete_folder(str(writer))

    # Chunks

    def put_chunk(self, payload: bytes, *, compress: bool = False) -> str:
        """Upload bytes as a chunk; return the name that a piece gives it."""
        with self._chunk_lock, self.state.transaction():
            seq = int(self.state.get("chunk_seq")) + 1
            self.state.put("chunk_seq", seq)
        name, body = self.sealer.seal(self.writer, Kind.CHUNK, seq, payload, compress=compress)
        self._upload(str(name), body)
        return f"{self.writer}/{name}"

    def read_pieces(self, pieces: Iterable[Piece]) -> Iterator[bytes]:
        """Fetch the bytes of pieces in order, one chunk in memory at a time.

        Raises DataError when a chunk is not whole, RefusedError when it is not what it should be.
        """
        at, payload = "", b""
        for piece in pieces:
            if piece.object != at:
                at, payload = piece.object, self._chunk(piece.object)
            if piece.offset < 0 or not 0 <= piece.length <= len(payload) - piece.offset:
                raise RefusedError("read a chunk", path=at, why="a piece lies outside of it")
            yield payload[piece.offset : piece.offset + piece.length]

    def _chunk(self, path: str) -> bytes:
        folder, _, file = path.partition("/")
        writer, name = Writer.parse(folder), ObjectName.parse(file)
        if writer is None or name is None or name.kind is not Kind.CHUNK:
            raise RefusedError("read a chunk", path=path[:200], why="not the name of a chunk")
        return self.sealer.open(writer, name, self.remote.read(path, limit=name.length))
