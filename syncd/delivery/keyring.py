"""The keys of a folder: one that seals and opens and, during a rotation, the one it replaces.

The previous key only opens, and less and less: once a writer has sealed by the new key, nothing in
its name, or in that of a successor, counts under the old one any more. A rotation is over at an
end when all that it stands for on the remote is sealed by the new key, and the other end's too.
"""

from __future__ import annotations

import hmac

from protocol.errors import RefusedError
from protocol.wire import ObjectName, Role, Sealer, Writer
from syncd.state import State


def mark(sealer: Sealer) -> str:
    """Return what tells keys apart, and nothing of the key."""
    return hmac.digest(sealer.key, b"syncd 1 mark", "sha256")[:8].hex() if sealer.key else ""


class Keyring:
    """Opens objects by the keys of this end, and keeps in the state how far a rotation is."""

    def __init__(self, state: State, sealer: Sealer, previous: Sealer | None = None) -> None:
        self._state = state
        self.sealer = sealer
        retired = previous is not None and mark(previous) == state.get("retired")
        self.previous = None if retired else previous

    def open(self, writer: Writer, name: ObjectName, body: bytes) -> bytes:
        """Like `Sealer.open`, by either key as long as the older one counts for this writer."""
        previous = self.previous
        try:
            payload = self.sealer.open(writer, name, body)
        except RefusedError:
            if previous is None:
                raise
        else:
            if previous is not None:
                self._note(writer)
            return payload
        payload = previous.open(writer, name, body)
        since = self._since(writer.role)
        if since is not None and writer >= since:
            raise RefusedError(
                "open an object", path=f"{writer}/{name}", why="sealed by a key that was replaced"
            )
        return payload

    def which(self, writer: Writer, name: ObjectName, body: bytes) -> Sealer | None:
        """Return the key that opens an object, None for neither. Raises DataError."""
        if _opens(self.sealer, writer, name, body):
            self._note(writer)
            return self.sealer
        if self.previous is not None and _opens(self.previous, writer, name, body):
            return self.previous
        return None

    def _note(self, writer: Writer) -> None:
        since = self._since(writer.role)
        if since is None or writer < since:
            self._state.put(f"new key {writer.role}", [mark(self.sealer), str(writer)])

    def _since(self, role: Role) -> Writer | None:
        """The first writer of a role that was seen to seal by the new key."""
        by, since = self._state.get(f"new key {role}", ["", ""])
        return Writer.parse(since) if by == mark(self.sealer) else None

    # This end's own objects

    def own_is_new(self) -> bool:
        """Whether all that this end stands for on the remote is sealed by the key that seals."""
        return bool(self._state.get("sealed by") == mark(self.sealer))

    def note_own(self) -> None:
        """Note that it is."""
        self._state.put("sealed by", mark(self.sealer))

    def retire(self) -> None:
        """Open nothing by the previous key any more, for good."""
        if self.previous is not None:
            self._state.put("retired", mark(self.previous))
            self.previous = None


def _opens(sealer: Sealer, writer: Writer, name: ObjectName, body: bytes) -> bool:
    try:
        sealer.open(writer, name, body)
    except RefusedError:
        return False
    return True
