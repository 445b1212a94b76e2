"""A remote in memory that is as bad as a remote may be, and a wrapper that makes any remote bad.

`FakeRemote` is not a real one, and stands where the real ones cannot be made to misbehave at will:
uploads are cut short and leave a torn file under the whole name, or a second file of the name; what
was uploaded is seen later, in another order, and by one end before the other; what was deleted is
still listed; a listing comes in any order, at times without sizes. It keeps no modification times
and no hashes at all.

`Unreliable` stands before a remote of either sort: a call fails before it has any effect or after
it had all of it, the process ends in it, and others go on meanwhile.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from protocol.errors import DataError
from syncd.rclone.profiles import LOCAL, Profile
from syncd.rclone.remote import Entry, NotFound, Remote, Transient

T = TypeVar("T")


class CrashError(BaseException):
    """The process ends here, as by SIGKILL: nothing that catches errors may catch it."""


@dataclass
class Faults:
    """How often something goes wrong, each a probability; `rng` draws.

    `meanwhile` is what others do, at times, while an end, whose name it is told, is in a call.
    """

    rng: random.Random
    meanwhile: Callable[[str], None] = lambda who: None
    error: float = 0.0
    torn: float = 0.0
    doubled: float = 0.0
    late: float = 0.0
    sizeless: float = 0.0
    crash: float = 0.0
    busy: float = 0.0

    def draw(self, chance: float) -> bool:
        return chance > 0 and self.rng.random() < chance

    def heal(self) -> None:
        """Let nothing go wrong any more."""
        self.error = self.torn = self.doubled = self.late = self.sizeless = 0.0
        self.crash = self.busy = 0.0


@dataclass
class _File:
    body: bytes
    hidden_from: set[str] = field(default_factory=set)
    deleted: bool = False


@dataclass
class Store:
    """What lies on the remote: for each path its files, of which there may be several."""

    files: dict[str, list[_File]] = field(default_factory=dict)
    ends: set[str] = field(default_factory=set)

    def settle(self) -> None:
        """Let everything be seen that was uploaded, and nothing that was deleted."""
        for path, found in list(self.files.items()):
            left = [file for file in found if not file.deleted]
            for file in left:
                file.hidden_from.clear()
            self.files[path] = left
            if not left:
                del self.files[path]

    def count(self) -> int:
        """How many files there are."""
        return sum(not file.deleted for found in self.files.values() for file in found)


class FakeRemote:
    """The view that the end `who` has of a store."""

    def __init__(self, store: Store, faults: Faults, who: str) -> None:
        self.store, self.faults, self.who = store, faults, who
        store.ends.add(who)

    def _seen(self, path: str) -> list[_File]:
        return [file for file in self.store.files.get(path, []) if self.who not in file.hidden_from]

    def list(self, folder: str) -> list[Entry]:
        prefix = f"{folder}/" if folder else ""
        found: list[Entry] = []
        folders: set[str] = set()
        for path in self.store.files:
            name, inside, _ = path.removeprefix(prefix).partition("/")
            seen = self._seen(path) if path.startswith(prefix) else []
            if seen and inside:
                folders.add(name)
                continue
            for file in seen:
                hidden = self.faults.draw(self.faults.sizeless)
                found.append(Entry(name, -1 if hidden else len(file.body), is_dir=False))
        found += [Entry(name, -1, is_dir=True) for name in sorted(folders)]
        self.faults.rng.shuffle(found)
        return found

    def read(self, path: str, *, limit: int) -> bytes:
        seen = self._seen(path)
        if not seen:
            raise NotFound("read", path=path, why="it is not there")
        body = self.faults.rng.choice(seen).body
        if len(body) > limit:
            raise DataError("read", path=path, why=f"longer than {limit} bytes")
        return body

    def download(self, path: str, target: Path, *, length: int) -> None:
        body = self.read(path, limit=length)
        if len(body) != length:
            raise DataError("download", path=path, why=f"not whole: {len(body)} of {length} bytes")
        target.write_bytes(body)

    def upload(self, source: Path, path: str) -> None:
        file = _File(source.read_bytes())
        there = self.store.files.setdefault(path, [])
        if self.faults.draw(self.faults.late):
            file.hidden_from = {end for end in sorted(self.store.ends) if self.faults.draw(0.5)}
        if self.faults.draw(self.faults.doubled):
            there.append(file)
        else:
            there[:] = [file]
        if self.faults.draw(self.faults.torn):
            file.body = file.body[: self.faults.rng.randrange(len(file.body) + 1)]
            raise Transient("upload", path=path, why="cut short")

    def replace(self, source: Path, path: str) -> None:
        raise NotImplementedError("a courtesy of real ends")

    def delete(self, folder: str, names: Sequence[str]) -> None:
        for name in names:
            self._delete(f"{folder}/{name}")

    def _delete(self, path: str) -> None:
        if not self.faults.draw(self.faults.late):
            self.store.files.pop(path, None)
        for file in self.store.files.get(path, []):
            file.deleted = True  # and listed for some, until the store settles
            file.hidden_from = {end for end in sorted(self.store.ends) if self.faults.draw(0.7)}

    def delete_folder(self, folder: str) -> None:
        for path in [p for p in self.store.files if p.startswith(f"{folder}/")]:
            del self.store.files[path]

    def make_root(self) -> None:
        return

    def check(self) -> None:
        return

    def kind(self) -> str:
        return "fake"

    def profile(self) -> Profile:
        return replace(LOCAL, transfers=1)  # so that what goes wrong does so in one order

    def hash_kind(self) -> str:
        return ""

    def hash_of(self, path: str, kind: str) -> str:
        return ""

    def local_path(self) -> Path | None:
        return None

    def anchor(self) -> Remote:
        return self


class Unreliable:
    """A remote that the end `who` reaches badly."""

    def __init__(self, remote: Remote, faults: Faults, who: str) -> None:
        self.remote, self.faults, self.who = remote, faults, who

    def _call(self, what: str, path: str, effect: Callable[[], T]) -> T:
        self._go_wrong(f"before {what}", path)
        result = effect()
        self._go_wrong(f"after {what}", path)
        return result

    def _go_wrong(self, what: str, path: str) -> None:
        self.faults.meanwhile(self.who)
        if self.faults.draw(self.faults.crash):
            raise CrashError(f"{what} {path}")
        if self.faults.draw(self.faults.error):
            raise Transient(what, path=path, why="a fault")

    def list(self, folder: str) -> list[Entry]:
        return self._call("list", folder, lambda: self.remote.list(folder))

    def read(self, path: str, *, limit: int) -> bytes:
        return self._call("read", path, lambda: self.remote.read(path, limit=limit))

    def download(self, path: str, target: Path, *, length: int) -> None:
        def download() -> None:
            self.remote.download(path, target, length=length)

        self._call("download", path, download)

    def upload(self, source: Path, path: str) -> None:
        self._call("upload", path, lambda: self.remote.upload(source, path))

    def replace(self, source: Path, path: str) -> None:
        self._call("replace", path, lambda: self.remote.replace(source, path))

    def delete(self, folder: str, names: Sequence[str]) -> None:
        for name in names:  # what goes wrong may do so with some of them gone
            path = f"{folder}/{name}"
            self._call("delete", path, partial(self.remote.delete, folder, [name]))

    def delete_folder(self, folder: str) -> None:
        self._call("delete", folder, lambda: self.remote.delete_folder(folder))

    def make_root(self) -> None:
        self._call("mkdir", "", self.remote.make_root)

    def check(self) -> None:
        self._call("check", "", self.remote.check)

    def kind(self) -> str:
        return self.remote.kind()

    def profile(self) -> Profile:
        return self.remote.profile()

    def hash_kind(self) -> str:
        return ""

    def hash_of(self, path: str, kind: str) -> str:
        return ""

    def local_path(self) -> Path | None:
        return None

    def anchor(self) -> Remote:
        return self
