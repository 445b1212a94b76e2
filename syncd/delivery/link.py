"""One end's side of the wire: packs out, packs in, chunks both ways.

The same code serves both ends. What is sent comes from an `Outgoing`, which keeps its own cursors
in the state; what arrives goes to an `Incoming`. Each is called inside the transaction that also
makes the pack, or moves the reading cursor, so a crash repeats a step or never began it.
"""

from __future__ import annotations

import itertools
import logging
import math
import secrets
import socket
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
    said_again,
)
from protocol.publish import temporary_beside
from protocol.wire import MAX_CHUNK_BYTES, Kind, ObjectName, Role, Sealer, Writer
from syncd.delivery.chunks import Block, Chunks
from syncd.delivery.keyring import Keyring
from syncd.delivery.peers import Peers
from syncd.delivery.refusals import Refusals
from syncd.rclone.remote import Entry, NotFound, Remote
from syncd.state import State

log = logging.getLogger("syncd")

PACK_BUDGET = 2 * 1024 * 1024
# After so many packs a state takes their place, whatever it costs, and they are deleted.
STATE_PACKS = 300
# Each look of the other end lists every pack again, so a state is made after fewer of them where
# it is small: one for each so many of its bytes, since a listed name costs its reader about 100
# bytes a look, and when it has to repeat little of what is not acknowledged.
STATE_BYTES_A_PACK = 512
LITTLE_BYTES = 64 * 1024
FEW_PACKS = 8
# An acknowledgement is an object too, so it waits for others to go along with.
ACK_SECONDS = 30.0
ACK_PACKS = 24
# A gap in what arrives that lasts longer is told.
GAP_SECONDS = 30.0


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

    def restate(self) -> Iterable[Message]:
        """Return what stands for everything that was said, but for logs that were acknowledged.

        Called, and drawn from, inside a transaction.
        """

    def unacked(self, acked: int) -> int:
        """Return how many bytes of logs a state would have to repeat, when so far is acked."""

    def kept_objects(self) -> set[str]:
        """Return the chunks that are still needed, as pieces name them."""

    def make_again(self, lost: set[str]) -> None:
        """Have what these chunks held brought to the remote, and said, again.

        Called inside a transaction.
        """


class Incoming(Protocol):
    """What this end does with what arrives."""

    def apply(self, writer: Writer, message: Message) -> None:
        """Apply one message, inside a transaction. It may come twice."""

    def restart(self, writer: Writer, messages: Sequence[Message]) -> None:
        """Forget what a writer said earlier and its state, which follows, does not repeat."""


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
        previous: Sealer | None = None,
    ) -> None:
        """`previous` opens what was sealed before the key was rotated."""
        self.remote = remote
        self.state = state
        self.peers = Peers(state, role)
        self.keys = Keyring(state, sealer, previous)
        self.role = role
        self.scratch = scratch
        self.outgoing = outgoing
        self.incoming = incoming
        self.refusals = Refusals()
        self.chunks = Chunks(
            remote=lambda: self.remote,
            state=state,
            keys=self.keys,
            writer=lambda: self.writer,
            scratch=scratch,
        )
        # When something other than acknowledgements and heartbeats last came or went.
        self.last_news = time.monotonic()
        self.last_heard = -math.inf  # when a pack or a state was last applied
        self._ack_due: float | None = None
        self._not_acked = 0
        self._unchallenged = 0
        self._unsure = True  # whether the first of the outbox may have arrived already
        self._swept: set[Writer] = set()  # predecessors of which nothing is left on the remote
        # What was missing when it was last looked for: packs, chunks.
        self._missed: set[int] = set()
        self._lost: set[str] = set()
        self._gaps: dict[Writer, tuple[int, float]] = {}

    @property
    def writer(self) -> Writer:
        """This incarnation. Raises RuntimeError before `open`."""
        writer = self.peers.own()
        if writer is None:
            raise RuntimeError("the link is not open")
        return writer

    # Joining

    def open(self) -> None:
        """Find this end's identity, or take a new one after reading all that there is.

        Raises FencedError when a newer incarnation is at work already.
        """
        if self.peers.own() is None:
            self._read_predecessors()
            # The other end may have heard some whose objects are not to be read any more.
            while self._pull_role(self.role.peer):
                pass
            writer = Writer(self.peers.next_epoch(), secrets.token_hex(4), self.role)
            with self.state.transaction():
                self.state.put("writer", str(writer))
                self.state.put("seq", 0)
                self.state.put("chunk_seq", 0)
                self.state.put("joined", False)
                # What predecessors left may be sealed by an earlier key.
                if self.keys.previous is None or not self.peers.known(self.role):
                    self.keys.note_own()
        else:
            self.mend()
        self.discover()
        if not self.joined:
            self._join()

    def mend(self) -> None:
        """See that what was sent is on the remote, and have it said again if it is not.

        So it is when the remote is another one, was emptied, or was away for a while and something
        else in its place: the other end would wait for ever for the packs that are missing.

        Raises DataError when more is there than was sent: this state is an older copy of its own.
        """
        kept = self.outgoing.kept_objects()
        names = self._names(self.writer)
        newer = [n for n in names if n.kind is not Kind.CHUNK and n.seq > self.last_seq()]
        if any(self._read(self.writer, name) is not None for name in newer):
            raise DataError(
                "go on where this end was",
                path=self.state.path,
                why=f"it is an older copy: {self.writer} has sent more than it knows of",
                hint="Move it away; a new incarnation takes over from what is on the remote.",
            )
        missing = self._missing(names)
        lost = self._lost_of(kept, names)
        # A remote may list late what it has: what is missing twice is missing.
        if missing & self._missed or (missing and not names):
            log.warning("objects of ours are missing on the remote; all is said again")
            self.state.put("state_seq", self.last_seq() - STATE_PACKS)
        if again := lost & self._lost if names else lost:
            log.warning("%d chunks of ours are missing on the remote; made again", len(again))
            with self.state.transaction():
                self.outgoing.make_again(again)
        self._missed, self._lost = missing, lost

    def _lost_of(self, kept: set[str], names: Sequence[ObjectName]) -> set[str]:
        """Which of the chunks that are needed, as pieces name them, are ours and not listed."""
        ours = {path for path in kept if path.startswith(f"{self.writer}/")}
        return ours - {f"{self.writer}/{name}" for name in names}

    def is_kept(self) -> bool:
        """Whether the anchor shows all that a successor needs of what was sent. Raises RemoteError.

        It is looked at now, and not taken from what uploads have said.
        """
        kept = self.outgoing.kept_objects()
        names = self.names_on(self.remote.anchor())
        return not (self._missing(names) or self._lost_of(kept, names))

    def is_heard(self) -> bool:
        """Whether the other end has applied all that was said, but for what is no news."""
        return self.acked() >= int(self.state.get("news_seq", self.last_seq()))

    def _missing(self, names: Sequence[ObjectName]) -> set[int]:
        """Packs that were sent and are not on the remote, nor stood for by a state there."""
        base = max((n.seq for n in names if n.kind is Kind.STATE), default=0)
        packs = {n.seq for n in names if n.kind is Kind.PACK}
        return set(range(base + 1, self._sent() + 1)) - packs

    @property
    def joined(self) -> bool:
        """Whether this end has made itself known, and read its predecessors to their end."""
        return bool(self.state.get("joined", False))

    def _join(self) -> None:
        """Say hello, and read once more what predecessors sent before they could have seen it.

        What such a one does only once it is on the remote and no successor is (an `sh:` is
        spawned), is then either known here, or is not done there.
        """
        if self.last_seq() == 0:
            with self.state.transaction():
                self._enclose([self._hello()])
        self._send_packs()
        said = self.peers.inherits()
        self._read_predecessors()
        with self.state.transaction():
            if self.peers.inherits() != said:
                self._enclose([self._hello()])
                self.state.put("hello_seq", self.last_seq())
            self.state.put("joined", True)

    def _read_predecessors(self) -> None:
        """Apply everything that earlier incarnations of this end wrote."""
        self.discover()
        while self._pull_role(self.role):
            pass

    def discover(self, *, thorough: bool = True) -> None:
        """Look for writers that are new. Raises FencedError when one of our role supersedes us.

        Unless it is `thorough`, folders where nobody has said hello for long are looked into now
        and then only.
        """
        own = self.peers.own()
        known = {own, *self.peers.known(Role.CONTROLLER), *self.peers.known(Role.WORKER)}
        sent = self._sent()
        clear = True
        for entry in self._all_folders() if thorough else self.remote.list(""):
            writer = Writer.parse(entry.name) if entry.is_dir else None
            if writer is None or writer in known:
                continue
            if not (thorough or self.refusals.is_due(entry.name)):
                clear = False
                continue
            names = self._hellos(writer)
            hello = self._hello_in(writer, names)
            if hello is not None:
                self.refusals.forget(entry.name)
                self.peers.admit(writer, hello)
                continue
            self.refusals.postpone(entry.name)
            if not all(self.refusals.is_refused(f"{writer}/{name}") for name in names):
                clear = False  # one of them may yet turn out to be its hello
        self.peers.check_fence()
        # What is seen says nothing of successors unless our own objects are among it.
        anchor = self.remote.anchor()
        if thorough and clear and own and not self._missing(self.names_on(anchor)):
            self._unchallenged = sent

    def _all_folders(self) -> list[Entry]:
        """The folders of all writers: surely those that the anchor shows at this moment."""
        anchor = self.remote.anchor()
        here = self.remote.list("") if anchor is not self.remote else []
        return list({entry.name: entry for entry in [*here, *anchor.list("")]}.values())

    def confirmed(self, seq: int) -> bool:
        """Whether pack `seq` is on the anchor, and no successor was, seen after it was there.

        It is `discover` that looks.
        """
        return self._unchallenged >= seq

    def last_seq(self) -> int:
        """The number of the newest pack that was made."""
        return int(self.state.get("seq", 0))

    def _sent(self) -> int:
        """Up to which pack all are on the remote."""
        row = self.state.row("SELECT MIN(seq) FROM outbox")
        return int(row[0]) - 1 if row and row[0] is not None else self.last_seq()

    def progress(self) -> tuple[int, int]:
        """Return what changes whenever something of what waits has reached the remote."""
        return self._sent(), int(self.state.get("chunk_seq", 0))

    def _hello_in(self, writer: Writer, names: Sequence[ObjectName]) -> Hello | None:
        for name in names:
            for message in self._read(writer, name) or ():
                if isinstance(message, Hello):
                    return message
        return None

    def _hellos(self, writer: Writer) -> list[ObjectName]:
        """The objects of a writer that begin with its hello, if they are its own: states first."""
        names = self._names(writer)
        found = [n for n in names if n.kind is Kind.STATE or (n.kind is Kind.PACK and n.seq == 1)]
        return sorted(found, key=lambda name: name.kind, reverse=True)

    # Reading

    def pull(self) -> bool:
        """Read and apply what is new from the other end; return whether anything was.

        Raises FencedError when the other end has heard a newer incarnation of this one.
        """
        applied = self._pull_role(self.role.peer)
        self.peers.check_fence()
        return applied

    def _pull_role(self, role: Role) -> bool:
        applied = False
        for writer in self.peers.known(role):
            following, last = self.peers.cursor(writer)
            if last is not None and following > last:
                continue
            applied |= self._pull_writer(writer, following, last)
            following, last = self.peers.cursor(writer)
            if last is not None and following <= last:
                break  # a successor's packs come after all that counts of this one
        return applied

    def _pull_writer(self, writer: Writer, following: int, last: int | None) -> bool:
        names = self._names(writer)
        packs: dict[int, list[ObjectName]] = {}
        for name in names:
            if name.kind is Kind.PACK:
                packs.setdefault(name.seq, []).append(name)
        following, first = self._apply_packs(writer, packs, following, last), following
        if self.peers.has_more_before(writer):
            return following > first  # more of its predecessor counts, it said, and comes first
        for state in sorted((n for n in names if n.kind is Kind.STATE), reverse=True):
            # A state stands for every pack up to its number; only a reader behind needs it, for a
            # pack that is gone, or cannot be told from what someone has put in its place.
            if state.seq < following or (last is not None and following > last):
                break
            if self._apply_state(writer, state):
                following = self._apply_packs(writer, packs, state.seq + 1, last)
                break
            if self.peers.has_more_before(writer):
                return True  # as its hello says; once that is read, this state is read again
        return following > first

    def _apply_packs(
        self, writer: Writer, packs: dict[int, list[ObjectName]], following: int, last: int | None
    ) -> int:
        """Apply packs in order from `following` on; return the number of the one to follow."""
        while following in packs and (last is None or following <= last):
            if not self._apply(writer, packs[following], following):
                break
            following += 1
            if self.peers.has_more_before(writer):
                break
        counts = any(seq > following for seq in packs) or (last is not None and following <= last)
        if counts and following not in packs:
            if self._gaps.get(writer, (0, 0.0))[0] != following:
                self._gaps[writer] = (following, time.monotonic())
        else:
            self._gaps.pop(writer, None)
        return following

    def waits(self) -> list[str]:
        """Packs that count and are missing for long, as others show: what comes next waits."""
        now = time.monotonic()
        return [
            f"waiting for pack {seq} of {writer} for {now - since:.0f} s: it is not on the remote"
            for writer, (seq, since) in list(self._gaps.items())
            if now - since > GAP_SECONDS
        ]

    def _names(self, writer: Writer) -> list[ObjectName]:
        """The objects in a writer's folder that have their full length."""
        return _whole(self.remote.list(str(writer)))

    def names_on(self, remote: Remote) -> list[ObjectName]:
        """The objects of this end that have their full length on one of several remotes."""
        return _whole(remote.list(str(self.writer)))

    def _apply(self, writer: Writer, candidates: list[ObjectName], seq: int) -> bool:
        for name in candidates:
            messages = self._read(writer, name)
            if messages is None:
                continue
            with self.state.transaction():
                for message in messages:
                    self._take(writer, message)
                self.peers.move_on(writer, seq + 1)
            self._owe_ack(messages)
            return True
        return False

    def _owe_ack(self, messages: Sequence[Message]) -> None:
        """Acknowledge these soon: at once a new writer, which is what fences the one before."""
        kinds, now = {message.type for message in messages}, time.monotonic()
        self.last_heard = now
        if kinds <= {"ack"}:
            return
        self._not_acked += 1
        if _is_news(messages):
            self.last_news = now
        elif self._not_acked < ACK_PACKS:
            return
        urgent = self._not_acked >= ACK_PACKS or "hello" in kinds
        due = now if urgent else now + ACK_SECONDS
        self._ack_due = min(due, self._ack_due or due)

    def _take(self, writer: Writer, message: Message) -> None:
        if isinstance(message, Hello):
            self.peers.settle(writer, message)
        elif not isinstance(message, Ack):
            try:
                self.incoming.apply(writer, message)
            except RefusedError as error:
                # One bad message must not keep the good ones after it away for ever.
                self.refusals.refuse(f"{writer} {message.type} {error}", str(error))
        elif message.writer == self.state.get("writer"):
            self.state.put("acked_by_peer", max(message.seq, self.acked()))
        else:
            self.peers.witness(message)

    def acked(self) -> int:
        """Up to which of our packs the other end has applied them."""
        return int(self.state.get("acked_by_peer", 0))

    def _apply_state(self, writer: Writer, name: ObjectName) -> bool:
        """Apply a state: message by message, since each may come twice and some fetch chunks."""
        messages = self._read(writer, name)
        if messages is None:
            return False
        with self.state.transaction():
            for message in messages:
                if isinstance(message, Hello):
                    self._take(writer, message)
        if self.peers.has_more_before(writer):
            return False
        with self.state.transaction():
            self.incoming.restart(writer, messages)
        for message in messages:
            try:
                message = self._filled(message)
            except RefusedError as error:
                self.refusals.refuse(f"{writer} {message.type} {error}", str(error))
                continue
            with self.state.transaction():
                self._take(writer, message)
        self.peers.move_on(writer, name.seq + 1)
        self._owe_ack(messages)
        return True

    def _filled(self, message: Message) -> Message:
        """Return a message of a state with the bytes that its pieces name."""
        if not isinstance(message, Append) or not message.pieces:
            return message
        length = sum(piece.length for piece in message.pieces)
        if length > MAX_CHUNK_BYTES or length != message.end - message.start:
            raise RefusedError(f"append to {message.path[:120]!r}", why="its pieces do not add up")
        return replace(message, pieces=(), blob=b"".join(self.read_pieces(message.pieces)))

    def _read(self, writer: Writer, name: ObjectName) -> list[Message] | None:
        """Read one object; None when it is not whole yet, gone, or refused (which is counted)."""
        path = f"{writer}/{name}"
        if not self.refusals.is_due(path):
            return None
        try:
            body = self.remote.read(path, limit=name.length)
            messages = decode_messages(self.keys.open(writer, name, body))
        except NotFound:
            return None
        except DataError:
            self.refusals.postpone(path)
            return None
        except RefusedError as error:
            self.refusals.refuse(path, str(error))
            return None
        except ValueError as error:
            self.refusals.refuse(path, f"open an object: {path}: {error}")
            return None
        self.refusals.forget(path)
        return messages

    # Writing

    def push(self) -> bool:
        """Send one pack of what is new; return whether there was anything to send."""
        if not self.state.row("SELECT 1 FROM outbox") and not self._make_pack():
            return False
        self._send_packs()
        return True

    def _send_packs(self) -> None:
        rows = self.state.rows("SELECT seq, name, body FROM outbox ORDER BY seq")
        if rows and self._unsure:
            rows = self._sent_again(rows)
        self._unsure = True
        for seq, name, body in rows:
            self.upload(name, body)
            self.state.run("DELETE FROM outbox WHERE seq = ?", seq)
        self._unsure = False

    def _sent_again(self, rows: Sequence[tuple[int, str, bytes]]) -> list[tuple[int, str, bytes]]:
        """Return what of the outbox is still to be sent, where the upload of the first has failed.

        It may have arrived, and been read. A second upload that is cut short would take its place
        if it had the same name.
        """
        (seq, name, body), *others = rows
        if name in self._surely_whole():
            self.state.run("DELETE FROM outbox WHERE seq = ?", seq)
            return others
        sent = ObjectName.parse(name)
        assert sent is not None
        payload = said_again(self.keys.open(self.writer, sent, body))
        new, body = self.keys.sealer.seal(self.writer, Kind.PACK, seq, payload)
        self.state.run("UPDATE outbox SET name = ?, body = ? WHERE seq = ?", str(new), body, seq)
        return [(seq, str(new), body), *others]

    def _surely_whole(self) -> set[str]:
        """The objects of this end that are listed with their full length."""
        listed = self.remote.list(str(self.writer))
        return {str(name) for name in _whole(entry for entry in listed if entry.size >= 0)}

    def _make_pack(self) -> bool:
        with self.state.transaction():
            messages = self.outgoing.collect(self.last_seq() + 1, PACK_BUDGET)
            messages += self._acks(forced=bool(messages))
            if messages:
                self._enclose(messages)
        if _is_news(messages):
            self.last_news = time.monotonic()
        return bool(messages)

    def _enclose(self, messages: Sequence[Message]) -> None:
        """Make the next pack of these, inside a transaction."""
        seq = self.last_seq() + 1
        name, body = self.keys.sealer.seal(self.writer, Kind.PACK, seq, encode_messages(messages))
        self.state.put("seq", seq)
        if _is_news(messages):
            self.state.put("news_seq", seq)
        self.state.run("INSERT INTO outbox VALUES (?, ?, ?)", seq, str(name), body)

    def _hello(self) -> Hello:
        return Hello(
            host=socket.gethostname(),
            version=version("syncd"),
            time=time.time(),
            inherits=self.peers.inherits(),
        )

    def _acks(self, *, forced: bool) -> list[Message]:
        """Acknowledge what was applied: along with other messages, or a little later alone."""
        due = self._ack_due is not None and time.monotonic() >= self._ack_due
        writer = self.peers.newest()
        if writer is None or not (forced or due):
            return []
        self._ack_due, self._not_acked = None, 0
        # It is heard, which fences those before it. But what is acknowledged is a sign for it that
        # nobody needs their folders any more.
        behind = self.peers.has_more_before(writer)
        seq = 0 if behind else self.peers.cursor(writer)[0] - 1
        if [str(writer), seq] == self.state.get("acked"):
            return []
        self.state.put("acked", [str(writer), seq])
        return [Ack(writer=str(writer), seq=seq)]

    def upload(self, name: str, body: bytes, remote: Remote | None = None) -> None:
        """Make an object of this end's: on that remote, if there are several."""
        source = temporary_beside(self.scratch / name)
        try:
            source.write_bytes(body)
            (remote or self.remote).upload(source, f"{self.writer}/{name}")
        finally:
            source.unlink(missing_ok=True)

    def ack_wait(self) -> float:
        """Seconds until an acknowledgement is to be sent; infinite when none is owed."""
        return math.inf if self._ack_due is None else max(self._ack_due - time.monotonic(), 0.0)

    def unsent(self) -> int:
        """How many bytes of packs wait in the outbox."""
        row = self.state.row("SELECT COALESCE(SUM(LENGTH(body)), 0) FROM outbox")
        return int(row[0]) if row else 0

    # States

    def compact(self) -> bool:
        """Put a state in the place of many packs, and delete what is not needed any more.

        Call it from the thread that puts chunks. Returns whether there was enough to do it for.
        Raises FencedError when a newer incarnation of this end is known: what is there is its.
        """
        self.peers.check_fence()
        reseal = not self.keys.own_is_new() and self._may_sweep()
        if not (reseal or self._is_state_due()):
            return False
        self.outgoing.pack_up(self.acked())
        with self.state.transaction():
            if self.state.row("SELECT 1 FROM outbox"):
                return False  # a pack is on its way: later
            seq = self.last_seq()
            acked = self.state.get("acked")
            acks = [Ack(writer=acked[0], seq=acked[1])] if acked else []
            payload = encode_messages(
                itertools.chain([self._hello(), *acks], self.outgoing.restate())
            )
        name, body = self.keys.sealer.seal(self.writer, Kind.STATE, seq, payload)
        self.upload(str(name), body)
        self.state.put("state_seq", seq)
        self.state.put("state_bytes", len(body))
        log.debug("state %d of %d bytes", seq, len(body))
        # What is not read yet stays for a reader that keeps up: a state costs it more.
        read = self.acked() if seq - self.acked() <= STATE_PACKS and not reseal else seq
        self._sweep(self.writer, read, keep=str(name))
        if self._may_sweep():
            for older in self.peers.known(self.role):
                if older < self.writer and older not in self._swept:
                    self._sweep(older, None, keep="")
            self.keys.note_own()
        return True

    def _is_state_due(self) -> bool:
        packs = self.last_seq() - int(self.state.get("state_seq", 0))
        enough = max(FEW_PACKS, int(self.state.get("state_bytes", 0)) // STATE_BYTES_A_PACK)
        return packs >= STATE_PACKS or (
            packs >= enough and self.outgoing.unacked(self.acked()) <= LITTLE_BYTES
        )

    def _may_sweep(self) -> bool:
        """Whether nobody needs the folders of predecessors: the other end acknowledges our last
        hello once it has read what that says of them."""
        heard = self.acked() >= int(self.state.get("hello_seq", 1))
        return heard or not self.peers.known(self.role)

    def _sweep(self, writer: Writer, seq: int | None, keep: str) -> None:
        """Delete what a state of ours, `keep`, stands for: packs up to `seq`, states, chunks."""
        kept = self.outgoing.kept_objects()
        left, doomed = 0, []
        for name in self._names(writer):
            path = f"{writer}/{name}"
            if name.kind is Kind.CHUNK:
                needed = path in kept
            else:
                needed = name.kind is Kind.PACK and seq is not None and name.seq > seq
            if needed or str(name) == keep:
                left += 1
            else:
                doomed.append(str(name))
        self.remote.delete(str(writer), doomed)
        if not left and writer != self.writer:
            self.remote.delete_folder(str(writer))
            self._swept.add(writer)

    def is_rotated(self) -> bool:
        """Whether nothing that anyone still needs is sealed by the previous key.

        That is so when this end's own objects are not, the other end has said hello by the new
        key, and has taken over what its predecessors left.
        """
        peer, new = self.peers.newest(), self.keys.sealer
        if peer is None:
            return self.keys.own_is_new()
        if new not in (self._sealed_by(peer, name) for name in self._hellos(peer)):
            return False
        left = (
            self._sealed_by(writer, name)
            for writer in self.peers.known(peer.role)
            if writer != peer
            for name in self._names(writer)
            if name.kind is not Kind.CHUNK
        )
        return self.keys.own_is_new() and self.keys.previous not in left

    def _sealed_by(self, writer: Writer, name: ObjectName) -> Sealer | None:
        """Return which of the keys opens an object, None for neither. It is read ever more rarely,
        since that does not change."""
        path = f"{writer}/{name}"
        if not self.refusals.is_due(f"key of {path}"):
            return None
        self.refusals.postpone(f"key of {path}")
        try:
            return self.keys.which(writer, name, self.remote.read(path, limit=name.length))
        except (NotFound, DataError):
            return None

    # Chunks

    def put_chunk(self, payload: bytes, *, compress: bool = False) -> str:
        """See `Chunks.put`."""
        return self.chunks.put(payload, compress=compress)

    def read_pieces(self, pieces: Iterable[Piece], *, trusting: bool = False) -> Iterator[Block]:
        """See `Chunks.read`."""
        return self.chunks.read(pieces, trusting=trusting)


def _whole(entries: Iterable[Entry]) -> list[ObjectName]:
    found = []
    for entry in entries:
        name = None if entry.is_dir else ObjectName.parse(entry.name)
        if name is not None and entry.size in (name.length, -1):
            found.append(name)
    return found


def _is_news(messages: Sequence[Message]) -> bool:
    """Whether there is more among these than acknowledgements and heartbeats."""
    return any(message.type not in ("ack", "status") for message in messages)
