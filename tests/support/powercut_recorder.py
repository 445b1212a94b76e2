"""Recording what code does to a folder, for `tests/support/powercut.py` to replay.

Recorded are the calls of `os` in `CALLS` and `SYNCS` by the thread that records, each with the
folder's content after it, as the page cache has it. What is written in another way, by a buffered
file or by a child, is noticed at the next of these calls.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import stat
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

from powercut import ROOT, File, Folder, Link, Node, Recording, Step, Tree, walk

CALLS = (
    *("open", "write", "truncate", "ftruncate", "posix_fallocate", "chmod", "fchmod"),
    *("replace", "rename", "link", "symlink", "unlink", "remove", "mkdir", "rmdir"),
)
SYNCS = ("fsync", "fdatasync", "sync")
_SHARED_MEMORY = "-shm"
_RANDOM = re.compile(r"\.[0-9a-f]{12}\.tmp(?=/|$)")
_PACKAGES = tuple(str(Path(__file__).parents[2] / name) + os.sep for name in ("syncd", "trainer"))
_PUBLISH = str(Path(__file__).parents[2] / "protocol" / "publish.py")


class Recorder:
    """Records what its thread does below `root`, from `with` on.

    `done` is for the code recorded: it says what has been promised from here on.

    `after` is what was recorded, elsewhere, before the process was killed that left `root` as it
    is: what was not durable then is not durable now.
    """

    def __init__(self, root: Path, *, after: Recording | None = None) -> None:
        self._root = root.resolve()
        self._numbers: dict[int, int] = {}
        self._new = itertools.count(ROOT)
        self._done: list[str] = []
        if after is not None:
            last = after.steps[-1]
            for path, (number, _) in {"": (ROOT, None), **walk(last.tree)}.items():
                self._numbers[(self._root / path).lstat().st_ino] = number
            self._new = itertools.count(1 + max(max(step.tree) for step in after.steps))
            self._done += last.done
        self._me = (os.getpid(), threading.get_ident())
        self._stack = contextlib.ExitStack()
        self.recording = after or Recording(self._look(), [])

    def __enter__(self) -> Recorder:
        for name in (*CALLS, *SYNCS):
            real = getattr(os, name)
            wrapper = self._sync(name, real) if name in SYNCS else self._call(name, real)
            self._stack.enter_context(patch.object(os, name, wrapper))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
        self._note("the end", always=True)

    def done(self, what: str) -> None:
        """Say that something is promised: it must outlast a power cut from now on."""
        self._note("write")
        self._done.append(what)
        self._note("done", always=True)

    def _call(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **how: Any) -> Any:
            if not self._is_mine():
                return real(*args, **how)
            self._note("write")
            result = real(*args, **how)
            self._note(name)
            return result

        return call

    def _sync(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def sync(*args: Any) -> None:
            if not self._is_mine():
                real(*args)
                return
            self._note("write")
            real(*args)
            number = None if name == "sync" else self._numbers.get(os.fstat(args[0]).st_ino)
            if number is not None or name == "sync":
                self._note(name, sync=self._name(number), synced=number, always=True)

        return sync

    def _is_mine(self) -> bool:
        return (os.getpid(), threading.get_ident()) == self._me

    def _note(
        self, call: str, *, always: bool = False, sync: str = "", synced: int | None = None
    ) -> None:
        tree = self._look()
        steps = self.recording.steps
        if always or tree != (steps[-1].tree if steps else self.recording.start):
            done = tuple(self._done)
            steps.append(Step(call=call, tree=tree, done=done, sync=sync, synced=synced))

    def _name(self, synced: int | None) -> str:
        """Name a sync: what is synced, and the function of ours that wanted it."""
        places = {number: path for path, (number, _) in walk(self._look()).items()}
        path = "everything" if synced is None else places.get(synced, "./")
        return f"{_RANDOM.sub('.tmp', path)} by {_caller()}"

    def _look(self) -> Tree:
        """Return the tree as the cache has it."""
        tree: dict[int, Node] = {}
        inodes: dict[int, int] = {}
        self._look_at(self._root, tree, inodes)
        self._numbers = inodes  # an inode that is gone may be given to another file
        return tree

    def _look_at(self, path: Path, tree: dict[int, Node], inodes: dict[int, int]) -> int:
        found = path.lstat()
        number = self._numbers.get(found.st_ino)
        number = inodes[found.st_ino] = next(self._new) if number is None else number
        mode = stat.S_IMODE(found.st_mode)
        if stat.S_ISDIR(found.st_mode):
            names = [name for name in os.listdir(path) if not name.endswith(_SHARED_MEMORY)]
            entries = {name: self._look_at(path / name, tree, inodes) for name in sorted(names)}
            tree[number] = Folder(mode, entries)
        elif stat.S_ISLNK(found.st_mode):
            tree[number] = Link(os.readlink(path))
        else:
            tree[number] = File(mode, path.read_bytes())
        return number


def _caller() -> str:
    """Return the innermost function of ours, and what of publish.py it called, if it did."""
    called = ""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code.co_filename.startswith(_PACKAGES):
            return f"{frame.f_code.co_qualname}{called and f', {called}'}"
        if frame.f_code.co_filename == _PUBLISH:
            called = frame.f_code.co_qualname
    return called
