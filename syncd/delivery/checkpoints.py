"""Checkpoints: brought to the remote a folder at a time, proved to be there, then relied on.

What a run's checkpoint folder holds is brought away as a group (`syncd.delivery.groups`), as it was
at a moment (`takes`), the newest file first, held meanwhile against a stage that prunes (`holds`).
What changes on its way gives the group up; what cannot be had makes it incomplete. What the stage
removes goes from the remote only once a newer group of about its size is proved to be there
(`proofs`); files that take the place of others under their names are named only then (`sayings`).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from protocol.checkpoints import CheckpointIndex
from protocol.errors import DataError
from protocol.logs import one_line
from protocol.messages import Message
from syncd.delivery.contents import Contents, file_sha256
from syncd.delivery.files import CHECKPOINTS, Found, run_of
from syncd.delivery.groups import Gone, Group, Kept, members, newest_safe, unneeded
from syncd.delivery.holds import Holds
from syncd.delivery.kept import KeptFiles
from syncd.delivery.proofs import Proofs
from syncd.delivery.sayings import CheckpointSayings, index_of
from syncd.delivery.takes import Key, Look, Snapshot, Taken, Takes, below, key_of, look_at
from syncd.delivery.uploads import Source
from syncd.state import State

PRUNED = "the stage removed it before its turn came"


class Checkpoints:
    """Those of a worker. `bring` and `prove` may run in two threads."""

    def __init__(
        self,
        *,
        state: State,
        root: Path,
        contents: Contents,
        proofs: Proofs,
        holds: Holds,
        is_over: Callable[[str], bool],
        sent: Callable[[], int],
        make_again: Callable[[set[str]], None],
    ) -> None:
        """`is_over` says of a run id whether that run has ended; `sent` up to which pack all are on
        the remote; `make_again` has brought there again what chunks held."""
        self._state = state
        self._root = root
        self._contents = contents
        self._proofs = proofs
        self._holds = holds
        self._is_over = is_over
        self._sent = sent
        self._make_again = make_again
        self._kept = KeptFiles(state)
        self._takes = Takes(root, holds)
        self._sayings = CheckpointSayings(self._kept, contents, is_over)
        self._pending: dict[str, Snapshot] = {}
        self._uploading = 0
        self._seen: set[str] = set()
        self.problems: dict[str, str] = {}

    # Bringing them away

    def bring(self) -> bool:
        """Bring to the remote what is new; may take long.

        Returns whether there is something to be said. Raises RemoteError; another call goes on
        where this one was.
        """
        self._takes.unsettled, self.problems = False, {}
        looks = {run: look_at(self._root, run) for run in self._runs()}
        self._seen = {run for run, look in looks.items() if look.files}
        news = self._bring_again()
        for run, look in looks.items():
            news |= self._bring_folder(run, look)
            self._tell_incomplete(run)
        self._holds.keep_only({k.sha256 for k in self._kept.where("proved IS NULL")})
        return news

    def _runs(self) -> list[str]:
        """The runs that have a folder, or had one."""
        known = {run_of(kept.path) for kept in self._kept.where("gone = ?", Gone.NO)}
        try:
            with os.scandir(self._root / CHECKPOINTS) as entries:
                there = {e.name for e in entries if e.is_dir(follow_symlinks=False)}
        except FileNotFoundError:
            there = set()
        except OSError:
            return []  # the scan of files tells
        return sorted(known | there | self._pending.keys())

    def _bring_folder(self, run: str, seen: Look) -> bool:
        if run not in self._pending:
            snapshot = self._take(run, seen)
            if snapshot is None:
                return False
            self._pending[run] = snapshot
        snapshot = self._pending[run]
        brought = self._upload(snapshot)
        del self._pending[run]
        if brought is None:
            self._takes.give_up(run, snapshot)
            return False
        return self._note(run, snapshot, brought)

    def _take(self, run: str, seen: Look) -> Snapshot | None:
        """Hold a run's folder if it is another than it was."""
        kept = self._kept.of(run)
        known = {_key(k) for k in kept}
        new = [each for each in seen.files if key_of(each) not in known]
        there = {key_of(each) for each in seen.files}
        back = any(k.gone and _key(k) in there for k in kept)
        gone = bool(_gone(kept, seen.files, seen.missing))
        groups = self._kept.groups(run)
        lacks = groups[-1].missing.keys() if groups else set()
        other = lacks != dict(below(run, seen.missing)).keys() or bool(seen.files and not groups)
        if not (new or gone or back or other):
            return None
        return self._takes.take(run, seen, new, gone=gone, final=self._is_over(run))

    def _upload(self, snapshot: Snapshot) -> list[tuple[Found, str]] | None:
        """Bring files to the remote; return which are there, by their hashes. None when one of them
        changed: then they were never there together."""
        hashed: list[Taken] = []
        changed: dict[Path, Exception] = {}
        self._uploading = sum(each.found.size for each in snapshot.taken)
        self._contents.uploaded = 0
        try:
            failed = self._contents.upload(self._sources(snapshot, hashed, changed))
        finally:
            self._uploading = 0
        brought: list[tuple[Found, str]] = []
        for each in hashed:
            try:
                if each.held in failed:
                    raise failed[each.held]
                self._takes.check(each)
                brought.append((each.found, each.sha256))
            except OSError as error:
                snapshot.missing[one_line(each.found.path)] = f"not sent: {error}"
            except DataError as error:
                changed[self._root / each.found.path] = error
        for path, why in changed.items():
            self.problems[one_line(path.relative_to(self._root).as_posix())] = f"not sent: {why}"
        return None if changed else brought

    def _sources(
        self, snapshot: Snapshot, hashed: list[Taken], changed: dict[Path, Exception]
    ) -> Iterator[Source]:
        """Yield what is to be sent, and note in `hashed` that it was; nothing more once a file has
        `changed`."""
        for each in snapshot.taken:
            if self._is_pruned(each, snapshot):
                snapshot.missing[one_line(each.found.path)] = PRUNED
                continue
            try:
                self._takes.keep(each, file_sha256(each.held, each.found.size))
            except OSError as error:
                snapshot.missing[one_line(each.found.path)] = f"not sent: {error}"
                continue
            except DataError as error:
                changed[self._root / each.found.path] = error
                return
            hashed.append(each)
            yield Source(path=each.held, sha256=each.sha256, size=each.found.size)

    def _is_pruned(self, one: Taken, snapshot: Snapshot) -> bool:
        """Whether the stage has removed a file and left a newer one, before its turn came."""
        newer = [t for t in snapshot.taken if t.found.made_ns > one.found.made_ns]
        there = [(self._root / t.found.path).exists() for t in newer]
        pruned = any(there) and not (self._root / one.found.path).exists()
        if pruned:
            self._holds.drop(one.held)
        return pruned

    def _note(self, run: str, snapshot: Snapshot, brought: list[tuple[Found, str]]) -> bool:
        """Note the next group of a run, and what is not there any more."""
        kept, there = self._kept.of(run), {key_of(found) for found in snapshot.files}
        same = [each for each in kept if _key(each) in there]
        gone = _gone(kept, snapshot.files, snapshot.missing)
        missing, groups = dict(below(run, snapshot.missing)), self._kept.groups(run)
        with self._state.transaction():
            for each in gone:
                self._kept.set(each, gone=Gone.HERE)
            again = _is_same(groups, kept, same, missing) and not brought
            noted = bool(same or brought or missing) and not again
            if noted:
                self._kept.note_group(run, same, brought, missing)
        self._takes.unsettled |= PRUNED in missing.values()  # the next look shows what is left
        return noted or bool(gone)

    def _tell_incomplete(self, run: str) -> None:
        """Name what the newest group of a run lacks."""
        for group in self._kept.groups(run)[-1:]:
            for name, why in group.missing.items():
                if why == PRUNED:
                    continue
                path = f"{CHECKPOINTS}/{run}/{name}".removesuffix("/.")
                told = f"{why}; without it the newest checkpoint is incomplete, and not safe"
                self.problems[path] = told

    def _bring_again(self) -> bool:
        """Bring contents to the remote once more that were lost there, or damaged."""
        unsaid = self._kept.where("told = 0")
        lost = [kept for kept in unsaid if not self._contents.pieces(kept.sha256)]
        sources = {self._where(kept): kept for kept in lost}
        failed = self._contents.upload(
            Source(path=path, sha256=kept.sha256, size=kept.size) for path, kept in sources.items()
        )
        for path in failed:  # it is nowhere any more
            self._kept.set(sources[path], gone=Gone.EVERYWHERE)
        return bool(lost)

    def _where(self, kept: Kept) -> Path:
        return self._holds.find(kept.sha256) or self._root / kept.path

    # Proving that they are there

    def prove(self) -> tuple[bool, bool]:
        """Find out what is really on the remote; may take long.

        Returns whether there is something to be said, and whether there is more to do at once.
        Raises RemoteError when the remote cannot be reached.
        """
        if self._holds.is_disk_low():
            self._holds.let_go_oldest()
        unproved = self._kept.where("proved IS NULL ORDER BY last DESC, made_ns DESC")
        wanted = (p for kept in unproved for p in self._objects(kept) if not self._proofs.how([p]))
        wrong, more = self._proofs.find(wanted) if unproved else (set(), False)
        news = bool(wrong)
        with self._state.transaction():
            if wrong:
                self._make_again(wrong)
            for kept in unproved:
                if how := self._proofs.how(self._objects(kept)):
                    self._kept.set(kept, proved=time.time(), how=how)
                    news = True
            news |= self._let_go()
        return news, more

    def look_again(self) -> None:
        """Take for unproved what has been moved to other chunks; forget the proofs of those that
        are not needed any more."""
        self._proofs.keep_only(self._contents.objects())
        for kept in self._kept.where("proved NOT NULL"):
            if not self._proofs.how(self._objects(kept)):
                self._kept.set(kept, proved=None)

    def _objects(self, kept: Kept) -> list[str]:
        return list(dict.fromkeys(p.object for p in self._contents.pieces(kept.sha256)))

    def _let_go(self) -> bool:
        """Find what the stage has removed and nobody needs any more; return whether any is."""
        for run in {run_of(kept.path) for kept in self._kept.where("gone = ?", Gone.HERE)}:
            kept, groups = self._kept.of(run), self._kept.groups(run)
            if self._is_over(run):
                useless = [k for k in kept if k.gone]
            else:
                useless = unneeded(kept, groups, self._sent())
            for each in useless:
                self._kept.set(each, gone=Gone.EVERYWHERE)
        return bool(self._kept.where("gone = ?", Gone.EVERYWHERE))

    # What is said of them

    def collect(self, seq: int, budget: int) -> list[Message]:
        """Return messages for what is new, and note that pack `seq` says it.

        Call it inside a transaction.
        """
        return self._sayings.collect(seq, budget)

    def live(self) -> Iterator[tuple[str, Path]]:
        """Yield the contents that are needed, each with a file that has it."""
        return ((kept.sha256, self._where(kept)) for kept in self._kept.where())

    def restate(self) -> Iterator[Message]:
        """Yield messages for all that was said."""
        return self._sayings.restate()

    def send_again(self, lost: Iterable[str]) -> None:
        """Have these contents, which were lost on the remote, brought there again."""
        for sha256 in lost:
            self._kept.lose(sha256)

    def said(self) -> set[str]:
        """Paths of the files that were said."""
        return {kept.path for kept in self._kept.where("pack > 0")}

    def unsent(self) -> int:
        """How many bytes are on their way."""
        return max(0, self._uploading - self._contents.uploaded)

    # What is told of them

    @property
    def unsettled(self) -> bool:
        """Whether the last round left something for the next one."""
        return self._takes.unsettled

    def is_waiting(self) -> bool:
        """Whether there are some of which it is not known whether they are safe."""
        return bool(
            self._kept.where("proved IS NULL OR pack > ? OR pack = 0 LIMIT 1", self._sent())
        )

    def is_behind(self) -> bool:
        """Whether the last round left or failed with some, or some are not known to be safe."""
        return self.unsettled or bool(self.problems) or self.is_waiting()

    def has_any(self, run: str) -> bool:
        """Whether there is anything in a run's folder."""
        return run in self._seen

    def newest_safe(self, run: str) -> Kept | None:
        """Return the newest checkpoint of a run that outlives this machine, or None."""
        return newest_safe(self._kept.of(run), self._kept.groups(run), self._sent())

    def index(self) -> CheckpointIndex:
        """Return all that is known, for a person and for programs."""
        return index_of(self._kept, self._sent())


def _key(kept: Kept) -> Key:
    return (kept.path, kept.size, kept.made_ns, kept.inode, kept.mode)


def _is_same(
    groups: Sequence[Group], kept: Sequence[Kept], same: Sequence[Kept], missing: Mapping[str, str]
) -> bool:
    """Whether the newest group of a run has these files, and lacks just these."""
    newest = groups[-1] if groups else None
    return (
        newest is not None
        and newest.missing == missing
        and {_key(k) for k in members(kept, newest.number)} == {_key(k) for k in same}
    )


def _gone(kept: Iterable[Kept], files: Collection[Found], missing: Mapping[str, str]) -> list[Kept]:
    """Return which files are not in a folder any more; what cannot be read may be there."""
    there, unread = {each.path for each in files}, tuple(f"{path}/" for path in missing)
    return [
        each
        for each in kept
        if not (each.gone or each.path in there or each.path.startswith(unread))
        and one_line(each.path) not in missing
    ]
