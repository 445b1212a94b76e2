"""The writers of a folder, of both roles: who counts, and how much of each.

Of a role the newest writer counts, and of each older one only what its successor has read. All of
it follows from hellos and acknowledgements, and is kept in the state.
"""

from __future__ import annotations

from collections import Counter

from protocol.errors import RefusedError
from protocol.messages import Ack, Hello
from protocol.wire import Role, Writer
from syncd.state import State


class FencedError(RefusedError):
    """A newer incarnation of this end, `by`, has taken over."""

    def __init__(self, writer: Writer, by: Writer) -> None:
        self.by = by
        super().__init__(
            f"{writer.role} {writer}",
            why=f"{by} has taken over this folder",
            hint="Stop the other one and remove .syncd/ here to take it back.",
        )


class Peers:
    """What an end of `role` knows of all writers but itself."""

    def __init__(self, state: State, role: Role) -> None:
        self._state = state
        self._role = role

    def own(self) -> Writer | None:
        """This incarnation, None before there is one."""
        return Writer.parse(self._state.get("writer") or "")

    def known(self, role: Role) -> list[Writer]:
        """Writers of a role that said a valid hello, oldest first."""
        found = [Writer.parse(row[0]) for row in self._state.rows("SELECT writer FROM peers")]
        return sorted(w for w in found if w is not None and w.role is role)

    def newest(self) -> Writer | None:
        """The incarnation of the other end that counts, or None when none was seen."""
        known = self.known(self._role.peer)
        return known[-1] if known else None

    def admit(self, writer: Writer, hello: Hello) -> None:
        """Count a writer in."""
        with self._state.transaction():
            newer = [w for w in self.known(writer.role) if w > writer]
            last = None
            for successor in newer[:1]:
                last = self._inherits(successor).get(str(writer), 0)
            self._state.run(
                "INSERT OR REPLACE INTO peers (writer, next, last) VALUES (?, 1, ?)",
                str(writer),
                last,
            )
            self.settle(writer, hello)

    def settle(self, writer: Writer, hello: Hello) -> None:
        """Settle how much of its predecessor counts: as much as the writer says it has read."""
        self._state.put(f"inherits {writer}", dict(hello.inherits))
        older = [w for w in self.known(writer.role) if w < writer]
        for predecessor in older[-1:]:
            counted = int(hello.inherits.get(str(predecessor), 0))
            self._state.run("UPDATE peers SET last = ? WHERE writer = ?", counted, str(predecessor))

    def _inherits(self, writer: Writer) -> dict[str, int]:
        return {w: int(n) for w, n in self._state.get(f"inherits {writer}", {}).items()}

    def inherits(self) -> dict[str, int]:
        """Up to which pack each predecessor of this end was read."""
        return {str(w): self.cursor(w)[0] - 1 for w in self.known(self._role)}

    def cursor(self, writer: Writer) -> tuple[int, int | None]:
        """The next pack of a known writer, and the last that counts, None for no end."""
        row = self._state.row("SELECT next, last FROM peers WHERE writer = ?", str(writer))
        assert row is not None
        return int(row[0]), row[1]

    def move_on(self, writer: Writer, following: int) -> None:
        """Note the next pack to be read of a writer."""
        self._state.run("UPDATE peers SET next = ? WHERE writer = ?", following, str(writer))

    def has_more_before(self, writer: Writer) -> bool:
        """Whether a predecessor of a writer has packs that count and were not applied."""
        rows = self._state.rows("SELECT writer FROM peers WHERE next <= last")
        behind = (Writer.parse(name) for (name,) in rows)
        return any(w.role is writer.role and w < writer for w in behind if w is not None)

    # What the other end has heard

    def witness(self, ack: Ack) -> None:
        """Keep what the other end says it has applied of other incarnations of this one."""
        other = Writer.parse(ack.writer)
        if other is not None and other.role is self._role:
            known = self._state.get("witnessed", {})
            seq = max(ack.seq, known.get(ack.writer, 0))
            self._state.put("witnessed", known | {ack.writer: seq})

    def _witnessed(self) -> dict[Writer, int]:
        found = {Writer.parse(w): int(n) for w, n in self._state.get("witnessed", {}).items()}
        return {w: n for w, n in found.items() if w is not None}

    def next_epoch(self) -> int:
        """The epoch of one that takes over from all of this role, here or heard by the other."""
        before = [*self.known(self._role), *self._witnessed()]
        return max((w.epoch for w in before), default=0) + 1

    def check_fence(self) -> None:
        """Raise FencedError when a newer writer of this role is known, here or to the other end."""
        own = self.own()
        if own is None:
            return
        newest = max([*self.known(self._role), *self._witnessed()], default=own)
        if newest > own:
            raise FencedError(own, newest)

    def unread(self) -> list[Writer]:
        """Predecessors that were heard by the other end further than they can be read here.

        Someone has deleted their objects, or their key is not ours.
        """
        read: Counter[str] = Counter(self.inherits())
        for successor in self.known(self._role):
            read |= Counter(self._inherits(successor))
        own, heard = self.own(), self._witnessed()
        return sorted(w for w, n in heard.items() if own and w < own and n > read[str(w)])
