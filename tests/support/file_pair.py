"""A worker's folder and another end's, with chunks between, for tests of files that travel."""

from __future__ import annotations

from chunks import Chunks

from syncd.delivery.contents import INLINE_BYTES, Contents
from syncd.delivery.files import LocalFiles
from syncd.delivery.received import RemoteFiles
from syncd.state import State

RUN = "in/artifacts/export.0003.7f3a"
LARGE = b"x" * (INLINE_BYTES + 1)


class Pair:
    """A worker's folder and another end's, with chunks between."""

    def __init__(self, root):
        self.here, self.there = root / "here", root / "there"
        self.chunks = Chunks()
        self.states = []
        self.local = LocalFiles(*self._end(self.here))
        self.remote = RemoteFiles(*self._end(self.there), wanted=lambda p: p.startswith("in/"))

    def _end(self, root):
        folder = root / ".syncd" / "files"
        folder.mkdir(parents=True)
        state = State(root / ".syncd" / "state.db")
        self.states.append(state)
        return state, root, Contents(state, folder, lambda: self.chunks)

    def write(self, path, data=b"data", mode=0o644):
        target = self.here / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)
        target.chmod(mode)
        return target

    def collect(self, budget=10**9):
        with self.states[0].transaction():
            return self.local.collect(budget)

    def deliver(self, messages):
        with self.states[1].transaction():
            for message in messages:
                self.remote.apply(message)

    def bring(self):
        self.local.scan(lambda path: True)
        self.deliver(self.collect())
        return self.remote.fetch()

    def blobs(self):
        return self.states[1].rows("SELECT sha256 FROM blobs WHERE owner = 'files'")
