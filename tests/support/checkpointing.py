"""A worker's checkpoints over a line of the test's choice, and a fresh worker that has them."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

from chunks import Chunks

from protocol.messages import CheckpointsGrouped, Content, DropFile, Message, PutFile
from syncd.delivery.checkpoints import Checkpoints
from syncd.delivery.chunks import Draft
from syncd.delivery.contents import Contents
from syncd.delivery.files import Found, walk
from syncd.delivery.holds import Holds
from syncd.delivery.proofs import Proofs
from syncd.delivery.received import RemoteFiles
from syncd.delivery.restores import Restores
from syncd.rclone.profiles import LOCAL, Profile
from syncd.rclone.remote import NotFound
from syncd.state import State

RUN = "train.0001.7f3a"
FOLDER = f"store/checkpoints/{RUN}"
LARGE = 9 * 1024 * 1024  # a chunk of its own


class Hashing:
    """Stands for a remote that knows the hash of each chunk, unless it is silent."""

    def __init__(self, chunks: Chunks) -> None:
        self.chunks = chunks
        self.silent = False

    def anchor(self) -> Hashing:
        return self

    def profile(self) -> Profile:
        return LOCAL

    def hash_kind(self) -> str:
        return "sha256"

    def hash_of(self, path: str, kind: str) -> str:
        if self.silent or path not in self.chunks.kept:
            raise NotFound("hash", path=path, why="it is not there")
        return hashlib.sha256(self.chunks.kept[path]).hexdigest()


class Line(Chunks):
    """Chunks that go one by one; `before` is what happens meanwhile, and may fail."""

    def __init__(self) -> None:
        super().__init__()
        self.before: Callable[[], object] = lambda: None

    def send(self, draft: Draft) -> str:
        try:
            self.before()
        except BaseException:
            draft.discard()
            raise
        return super().send(draft)


class Vm:
    """A worker's checkpoints, with what it says taken down."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / ".syncd" / "held").mkdir(parents=True)
        (root / ".syncd" / "files").mkdir()
        self.state = State(root / ".syncd" / "state.db")
        self.chunks = Line()
        self.remote = Hashing(self.chunks)
        self.contents = Contents(self.state, root / ".syncd" / "files", lambda: self.chunks)
        self.proofs = Proofs(self.state, lambda: self.remote, root / ".syncd", lambda: 0.0)
        self.over = False
        self.packs = 0
        self.restart()

    def restart(self) -> None:
        self.holds = Holds(self.root / ".syncd" / "held")
        self.checkpoints = Checkpoints(
            state=self.state,
            root=self.root,
            contents=self.contents,
            proofs=self.proofs,
            holds=self.holds,
            is_over=lambda run: self.over,
            sent=lambda: self.packs,
            make_again=lambda lost: self.checkpoints.send_again(self.contents.lose(lost)),
        )

    def save(self, name: str, data: bytes = b"", *, made: int) -> Path:
        path = self.root / FOLDER / name
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(".tmp")
        temporary.write_bytes(data or name.encode())
        os.utime(temporary, (made, made))
        return temporary.replace(path)

    def remove(self, name: str) -> None:
        (self.root / FOLDER / name).unlink()

    def found(self) -> list[Found]:
        return list(walk(self.root, FOLDER, {}))

    def bring(self) -> list[str]:
        """Bring away what there is; return what is said of it."""
        self.checkpoints.bring()
        return self.say()

    def say(self) -> list[str]:
        with self.state.transaction():
            messages = self.checkpoints.collect(self.packs + 1, 10**6)
        self.packs += bool(messages)
        return [told(message) for message in messages]

    def prove(self) -> list[str]:
        self.checkpoints.prove()
        return self.say()

    def safe(self) -> list[str]:
        found = self.checkpoints.index().runs.get(RUN, ())
        return [file.path for file in found if file.safe is not None]

    def on_remote(self) -> set[str]:
        """What a fresh worker would find: by what a state would say."""
        said = [m for m in self.checkpoints.restate() if isinstance(m, PutFile)]
        return {Path(message.path).name for message in said}

    def held(self) -> list[str]:
        return sorted(path.name for path in (self.root / ".syncd" / "held").iterdir())


def told(message: Message) -> str:
    if isinstance(message, Content):
        return "content"
    if isinstance(message, CheckpointsGrouped):
        return f"group of {message.files}"
    assert isinstance(message, PutFile | DropFile)
    return f"{message.type} {Path(message.path).name}"


class FreshVm:
    """A worker on an empty disk that is told of what another had."""

    def __init__(self, root: Path, chunks: Chunks) -> None:
        self.root = root
        (root / ".syncd" / "files").mkdir(parents=True)
        self.state = State(root / ".syncd" / "state.db")
        self.chunks = chunks
        self.contents = Contents(self.state, root / ".syncd" / "files", lambda: self.chunks)
        self.files = RemoteFiles(self.state, root, self.contents, lambda path: True)
        self.restart()

    def restart(self) -> None:
        private = self.root / ".syncd" / "restored"
        self.restores = Restores(self.state, self.root, private, self.contents)

    def hear(self, messages: list[Message]) -> None:
        for message in messages:
            assert isinstance(message, Content | PutFile | CheckpointsGrouped | DropFile)
            self.files.apply(message)

    def found(self) -> dict[str, bytes]:
        """All that lies in the run's folder."""
        folder = self.root / FOLDER
        paths = [path for path in folder.rglob("*") if path.is_file()]
        return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def restored(vm: Vm, root: Path) -> dict[str, bytes]:
    """What a fresh worker comes to, by what a state would say and the chunks hold."""
    fresh = FreshVm(root, vm.chunks)
    try:
        fresh.hear(list(vm.checkpoints.restate()))
        assert fresh.restores.fetch()
        assert not (fresh.root / ".syncd" / "restored").exists()
        return fresh.found()
    finally:
        fresh.state.close()
