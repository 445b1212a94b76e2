"""Power cuts: what may be on the disk when the power goes, at any moment of what was recorded.

SIGKILL keeps the page cache, so it cannot show a missing fsync. Here a `Recorder` notes, step by
step, what a piece of code writes, creates, renames, removes and syncs below a folder; a `Disk`
replays those steps and knows what is durable and what is only in the cache; and `states` are the
folders that a machine may find when it comes up again.

The disk is one that promises what POSIX does for fsync, and nothing more, after the survey of file
systems by Pillai et al., "All File Systems Are Not Created Equal", OSDI 2014:

- A file's bytes and mode are durable as of the last fsync of that file. What came after may be
  lost, be there whole, or be torn: cut short; as long as it was to be, with zeros or what stood
  there before in place of its end, its middle or all of it. A file that was never synced may be
  empty whatever name it has: "the zero-length file after a rename".
- A name's being there, being gone, or standing for another file is durable as of the last fsync
  of its folder. Of the changes after it any may be lost and any kept; a rename within a folder is
  one change.
- os.sync makes all durable, and waits for it, as Linux does. A symbolic link, which no call can
  sync, has its text when it has its name. Bytes that were durable and not written again stay.
- SQLite's files (`*.db`, `*.db-wal`, `*.db-journal`) are durable as soon as they are seen: it syncs
  them, and their folder, before a commit returns. A test looks at what it calls.

Every order of steps cannot be tried. Tried are, at each step: all subsets of up to four changes of
names, and of more: none, all, the first n, each alone, all but one; together with all files as
they were synced, all as they are in the cache, and each file's torn forms while the other files
are the one or the other.

`tests/support/powercut_recorder.py` says what is recorded.
"""

from __future__ import annotations

import contextlib
import itertools
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeAlias

ROOT = 0
_SQLITE = re.compile(r"\.db(-wal|-journal)?$")
# Where there is one: what is found after a power cut is looked at once, and need not be durable.
_MEMORY = Path("/dev/shm")


@dataclass(frozen=True)
class File:
    mode: int
    data: bytes


@dataclass(frozen=True)
class Link:
    target: str


@dataclass(frozen=True)
class Folder:
    mode: int
    entries: Mapping[str, int] = field(default_factory=dict, hash=False)


Node: TypeAlias = File | Link | Folder
# A tree by node, for the cache and the disk; by path, for what is found after a power cut.
Tree: TypeAlias = Mapping[int, Node]
State: TypeAlias = Mapping[str, Node]
Check: TypeAlias = Callable[[Path, tuple[str, ...]], None]


@dataclass(frozen=True, kw_only=True)
class Step:
    """One step of a recording, and how the cache was after it.

    `sync` names what a sync was of and who called it; `synced` is the node, None for all of them.
    `done` is what the code had said by then, through `Recorder.done`.
    """

    call: str
    tree: Tree
    done: tuple[str, ...]
    sync: str = ""
    synced: int | None = None


@dataclass(frozen=True)
class Recording:
    """What was on the disk, all of it durable, and the steps from there.

    The first `known` of them are another recording's, after which the process was killed.
    """

    start: Tree
    steps: list[Step]
    known: int = 0

    @property
    def syncs(self) -> list[str]:
        """The names of the syncs, each once, in order. Of equal ones none is left out alone."""
        return list(dict.fromkeys(step.sync for step in self.steps if step.sync))

    def kills(self) -> Iterator[tuple[Recording, State]]:
        """Yield what was recorded up to each step, and the cache then: SIGKILL leaves that."""
        for at, step in enumerate(self.steps, start=1):
            if step.tree != (self.steps[at - 2].tree if at > 1 else self.start):
                state = {path: node for path, (_, node) in walk(step.tree).items()}
                yield Recording(self.start, self.steps[:at], known=at), state

    def cuts(self, *, without: str = "") -> Iterator[tuple[Step, State]]:
        """Yield each different state that a power cut may leave, and the last step before it.

        `without` names a sync that is passed over, as if the code did not make it.
        """
        disk = Disk(self.start)
        seen = set()
        first = Step(call="start", tree=self.start, done=())
        for at, step in enumerate([first, *self.steps]):
            disk.take(step, synced=step.sync != without)
            for state in disk.states() if at >= self.known else ():
                key = (step.done, frozenset(state.items()))
                if key not in seen:
                    seen.add(key)
                    yield step, state


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """How many states were checked, and what was wrong with the first that did not pass."""

    states: int
    wrong: str = ""


def judge(recording: Recording, check: Check, *, without: str = "") -> Verdict:
    """Check each state in a fresh folder, up to the first that does not pass."""
    with scratch() as folder:
        return _judge(recording, check, folder / "cut", without)


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """Lend a folder for what need not be durable."""
    with tempfile.TemporaryDirectory(dir=_MEMORY if _MEMORY.is_dir() else None) as folder:
        yield Path(folder)


def _judge(recording: Recording, check: Check, folder: Path, without: str) -> Verdict:
    count = 0
    for count, (step, state) in enumerate(recording.cuts(without=without), start=1):
        materialise(state, folder)
        try:
            check(folder, step.done)
        except Exception as error:  # whatever a program does that finds such a folder
            found = {path: node for path, node in state.items() if not isinstance(node, Folder)}
            told = f"{type(error).__name__}: {error}"
            return Verdict(states=count, wrong=f"after {step.call}, {step.done}: {told}: {found}")
        finally:
            shutil.rmtree(folder)
    return Verdict(states=count)


def materialise(state: State, folder: Path) -> None:
    """Make `folder` what `state` says."""
    folder.mkdir(parents=True)
    for path, node in state.items():  # a folder comes before what is in it
        target = folder / path
        if isinstance(node, Folder):
            target.mkdir()
        elif isinstance(node, Link):
            target.symlink_to(node.target)
        else:
            target.write_bytes(node.data)
        if not isinstance(node, Link):
            target.chmod(node.mode)


# The disk


@dataclass(frozen=True)
class _Change:
    """What one call did to a folder: names, and the nodes that they stand for since."""

    folder: int
    names: Mapping[str, int | None]


class Disk:
    """What is durable, and what the cache has beyond it."""

    def __init__(self, tree: Tree) -> None:
        self._cache = tree
        self._durable: dict[int, Node] = dict(tree)
        # For each file: how it was at each step since it was last durable.
        self._versions: dict[int, list[File]] = {}
        self._changes: list[_Change] = []

    def take(self, step: Step, *, synced: bool = True) -> None:
        """Take in one step; a sync has no effect unless it is `synced`."""
        for number, node in step.tree.items():
            before = self._cache.get(number)
            if node != before:
                self._take_node(number, before, node)
        self._cache = step.tree
        self._trust_sqlite()
        if synced and step.sync:
            for number in [step.synced] if step.synced is not None else [*self._durable]:
                self._sync(number)

    def _take_node(self, number: int, before: Node | None, node: Node) -> None:
        if isinstance(node, File):
            self._durable.setdefault(number, File(node.mode, b""))
            self._versions.setdefault(number, []).append(node)
        elif isinstance(node, Link):
            self._durable[number] = node
        else:
            durable = self._durable.get(number)
            entries = durable.entries if isinstance(durable, Folder) else {}
            self._durable[number] = Folder(node.mode, entries)
            old = before.entries if isinstance(before, Folder) else {}
            self._changes += self._changes_of(number, old, node.entries)

    def _changes_of(
        self, folder: int, old: Mapping[str, int], new: Mapping[str, int]
    ) -> Iterator[_Change]:
        names = {name for name in {*old, *new} if old.get(name) != new.get(name)}
        for name in sorted(names & set(new)):
            node = new[name]
            came_from = [n for n in names if old.get(n) == node]
            if not came_from and node in self._cache and node not in old.values():
                raise NotImplementedError(f"{name} was renamed or linked across folders")
            together = {name, *came_from} & names
            names -= together
            if together:
                yield _Change(folder, {n: new.get(n) for n in together})
        yield from (_Change(folder, {name: None}) for name in sorted(names))

    def _trust_sqlite(self) -> None:
        for change in list(self._changes):
            if all(map(_SQLITE.search, change.names)):
                self._apply(self._durable, change)
                self._changes.remove(change)
        for node in self._cache.values():
            for name, number in node.entries.items() if isinstance(node, Folder) else ():
                if _SQLITE.search(name):
                    self._sync(number)

    def _sync(self, number: int) -> None:
        if number in self._versions:
            self._durable[number] = self._versions.pop(number)[-1]
        for change in [change for change in self._changes if change.folder == number]:
            self._apply(self._durable, change)
            self._changes.remove(change)

    @staticmethod
    def _apply(nodes: dict[int, Node], change: _Change) -> None:
        folder = nodes[change.folder]
        assert isinstance(folder, Folder)
        entries = {**folder.entries, **change.names}
        kept = {name: node for name, node in entries.items() if node is not None}
        nodes[change.folder] = replace(folder, entries=kept)

    def states(self) -> Iterator[State]:
        """Yield what may be on the disk now; the docstring of the module says what is tried."""
        for changes in _subsets(self._changes):
            nodes = dict(self._durable)
            for change in changes:
                self._apply(nodes, change)
            reached = {number for number, _ in walk(nodes).values()}
            for contents in self._contents(reached):
                yield {path: node for path, (_, node) in walk({**nodes, **contents}).items()}

    def _contents(self, reached: set[int]) -> Iterator[Mapping[int, File]]:
        """Yield what the files among `reached` that are not durable may hold."""
        whole = {n: versions[-1] for n, versions in self._versions.items() if n in reached}
        yield {}
        yield whole
        for number in whole:
            durable = self._durable[number]
            assert isinstance(durable, File)
            for form in _torn_forms([durable, *self._versions[number]]):
                yield {**whole, number: form}
                yield {number: form}


def _subsets(changes: list[_Change]) -> Iterator[list[_Change]]:
    count = len(changes)
    if count <= 4:
        for size in range(count + 1):
            yield from map(list, itertools.combinations(changes, size))
        return
    yield from (changes[:size] for size in range(count + 1))
    for at in range(count):
        yield [changes[at]]
        yield changes[:at] + changes[at + 1 :]


def _torn_forms(versions: list[File]) -> Iterator[File]:
    """Yield what may be left of a file that was as each of `versions` in turn."""
    yield from versions
    for old, new in [*itertools.pairwise(versions), (versions[0], versions[-1])]:
        yield from (File(mode, data) for mode in {old.mode, new.mode} for data in torn(old, new))


def torn(old: File, new: File) -> list[bytes]:
    """Return what may be left of the bytes of `new` that were written over `old`."""
    differing = (at for at, (a, b) in enumerate(zip(old.data, new.data, strict=False)) if a != b)
    kept = next(differing, min(len(old.data), len(new.data)))
    middle = (kept + len(new.data) + 1) // 2
    behind = old.data.ljust(len(new.data), b"\0")
    return [
        new.data[:middle],
        new.data[:middle] + old.data[middle:],
        behind[: len(new.data)],
        new.data[:middle] + behind[middle : len(new.data)],
        behind[:middle] + new.data[middle:],
    ]


def walk(nodes: Mapping[int, Node]) -> dict[str, tuple[int, Node]]:
    """Return what can be reached from the root, by path; a folder before what is in it."""
    found: dict[str, tuple[int, Node]] = {}
    pending = [("", ROOT)]
    while pending:
        path, number = pending.pop()
        node = nodes[number]
        if isinstance(node, Folder):
            pending += [(f"{path}/{name}".lstrip("/"), n) for name, n in node.entries.items()]
            node = Folder(node.mode)
        if path:
            found[path] = (number, node)
    return found
