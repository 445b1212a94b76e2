"""Ends of a link that say words, for tests of what is heard."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Sequence
from pathlib import Path

from places import Place

from protocol.messages import DropFile, Message
from protocol.wire import KEY_BYTES, Role, Sealer, Writer
from syncd.delivery.link import Link
from syncd.delivery.peers import FencedError
from syncd.state import State

KEY = secrets.token_bytes(KEY_BYTES)
FOLDER = "f0"


class Talker:
    """An end that says words, one in a message, and remembers those it heard."""

    def __init__(
        self, place: Place, folder: Path, role: Role, key: bytes = KEY, previous: bytes = b""
    ) -> None:
        folder.mkdir(exist_ok=True)
        self.words: list[str] = []
        self.said: list[str] = []
        self.heard: list[tuple[str, str]] = []
        self.root = place.root
        self.state = State(folder / "state.db")
        self.link = Link(
            remote=place.remote,
            state=self.state,
            sealer=Sealer(folder=FOLDER, key=key),
            role=role,
            scratch=folder,
            outgoing=self,
            incoming=self,
            previous=Sealer(folder=FOLDER, key=previous) if previous else None,
        )

    def say(self, *words: str) -> None:
        """Send each word in a pack of its own."""
        for word in words:
            self.words.append(word)
            while self.link.push():
                pass

    def listen(self) -> list[str]:
        """Read everything; return the words that were heard so far."""
        self.link.discover()
        while self.link.pull():
            pass
        return [word for _, word in self.heard]

    def listen_while_fenced(self) -> None:
        """Read everything, as one does that finds out only by that that it was replaced."""
        for step in (self.link.pull, self.link.discover):
            with contextlib.suppress(FencedError):
                step()

    def heard_from(self, role: Role) -> list[str]:
        """The words that were heard from one end and its predecessors."""
        return [word for writer, word in self.heard if writer[0] == role[0]]

    @property
    def folder(self) -> Path:
        return self.root / str(self.link.writer)

    def collect(self, seq: int, budget: int) -> list[Message]:
        words, self.words = self.words, []
        self.said += words
        return [DropFile(path=word) for word in words]

    def apply(self, writer: Writer, message: Message) -> None:
        if isinstance(message, DropFile):
            self.heard.append((str(writer), message.path))

    def restart(self, writer: Writer, messages: Sequence[Message]) -> None:
        self.heard = [(w, word) for w, word in self.heard if w != str(writer)]

    def pack_up(self, acked: int) -> None:
        return

    def restate(self) -> list[Message]:
        return [DropFile(path=word) for word in self.said]

    def unacked(self, acked: int) -> int:
        return 0

    def make_again(self, lost: set[str]) -> None:
        assert not lost, "it makes no chunks"

    def kept_objects(self) -> set[str]:
        return set()


class Cast:
    """Makes talkers, and closes what they opened."""

    def __init__(self, place: Place, folder: Path) -> None:
        self.place, self.folder = place, folder
        self.talkers: list[Talker] = []

    def new(self, role: Role, key: bytes = KEY, previous: bytes = b"") -> Talker:
        name = f"{role}-{len(self.talkers)}"
        self.talkers.append(Talker(self.place, self.folder / name, role, key, previous))
        return self.talkers[-1]

    def opened(self, role: Role, key: bytes = KEY, previous: bytes = b"") -> Talker:
        talker = self.new(role, key, previous)
        talker.link.open()
        return talker

    def rekeyed(self, talker: Talker, key: bytes, previous: bytes = b"") -> Talker:
        """The same end, started again with another key. What it has said it still knows."""
        talker.state.close()
        folder = talker.state.path.parent
        again = Talker(self.place, folder, talker.link.role, key, previous)
        again.said, again.heard = talker.said, talker.heard
        self.talkers.append(again)
        again.link.open()
        return again
