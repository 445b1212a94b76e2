"""Checkpoints: brought to the remote a folder at a time, proved to be there, then relied on.

What a run's checkpoint folder holds is brought away as a group (`syncd.delivery.groups`), the
newest file first, held meanwhile against a stage that prunes (`holds`). What the stage removes goes
from the remote only once something newer is proved to be there (`proofs`); a file that takes the
place of another under its name is named only then.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from protocol.checkpoints import CheckpointFile, CheckpointIndex
from protocol.errors import DataError
from protocol.logs import one_line
from protocol.messages import Content, DropFile, Message, PutFile
from syncd.delivery.contents import Contents, file_sha256
from syncd.delivery.files import CHECKPOINTS, SETTLE_SECONDS, Found, run_of
from syncd.delivery.groups import Gone, Kept, is_proved, newest_safe, unneeded
from syncd.delivery.holds import Holds
from syncd.delivery.proofs import Proofs
from syncd.delivery.uploads import Source
from syncd.state import State

# A folder in which something always changes is brought away after so long without what does.
PATIENCE_SECONDS = 10.0
_COLUMNS = [field.name for field in fields(Kept)]


@dataclass(slots=True)
class _Taken:
    """A file on its way, and where it is held now."""

    found: Found
    held: Path


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
        self._pending: dict[str, list[_Taken]] = {}
        self._uploading = 0
        self._seen: set[str] = set()
        self.unsettled = False  # whether the last round left files for the next one
        self.problems: dict[str, str] = {}

    # Bringing them away

    def bring(self, found: Sequence[Found], is_unread: Callable[[str], bool]) -> bool:
        """Bring to the remote what is new of these, which are all there are; may take long.

        `is_unread` says of a path whether it may be there nevertheless. Returns whether there is
        something to be said. Raises RemoteError; another call goes on where this one was.
        """
        self.unsettled, self.problems = False, {}
        folders: dict[str, list[Found]] = {}
        for each in found:
            folders.setdefault(run_of(each.path), []).append(each)
        self._seen = set(folders)
        there = {each.path for each in found}
        for kept in self._kept("gone = ?", Gone.NO):
            if kept.path not in there and not is_unread(kept.path):
                folders.setdefault(run_of(kept.path), [])
        for run in self._pending:
            folders.setdefault(run, [])
        news = self._bring_again()
        for run, files in folders.items():
            news |= self._bring_folder(run, files, is_unread)
        self._holds.keep_only({k.sha256 for k in self._kept("proved IS NULL")})
        return news

    def _bring_folder(
        self, run: str, found: Sequence[Found], is_unread: Callable[[str], bool]
    ) -> bool:
        kept = self._of(run)
        known = {(k.path, k.size, k.made_ns, k.inode, k.mode): k for k in kept}
        there = {each.path for each in found}
        gone = [k for k in kept if not k.gone and k.path not in there and not is_unread(k.path)]
        same = [k for f in found if (k := known.get(_key(f)))]
        new = [f for f in found if _key(f) not in known]
        if run not in self._pending:
            ready = self._ready(new, final=self._is_over(run))
            if not (ready or gone):
                return False
            self._pending[run] = self._take(ready)
        brought = self._upload(self._pending[run])
        del self._pending[run]
        with self._state.transaction():
            self._note(run, kept, same, gone, brought)
        return bool(brought)

    def _ready(self, new: Sequence[Found], *, final: bool) -> list[Found]:
        """Return which of these are to be brought away now: together, once none changes."""
        settled = [f for f in new if final or f.settled(SETTLE_SECONDS)]
        if len(settled) < len(new):
            self.unsettled = True
            if not any(f.settled(PATIENCE_SECONDS) for f in settled):
                return []
        return settled

    def _take(self, found: Iterable[Found]) -> list[_Taken]:
        """Hold these files, the newest first."""
        taken = []
        for each in sorted(found, key=lambda f: (f.made_ns, f.path), reverse=True):
            try:
                taken.append(_Taken(each, self._holds.take(self._root / each.path)))
            except FileNotFoundError:
                continue  # removed meanwhile: it was not needed
            except OSError as error:
                self.problems[one_line(each.path)] = f"not sent: {error}"
        return taken

    def _upload(self, taken: Sequence[_Taken]) -> list[tuple[Found, str]]:
        """Bring files to the remote; return which are there, by their hashes."""
        hashed: list[tuple[_Taken, str]] = []

        def sources() -> Iterator[Source]:
            for each in taken:
                if self._is_superseded(each, taken):
                    self._holds.drop(each.held)
                    continue
                try:
                    sha256 = file_sha256(each.held, each.found.size)
                    each.held = self._holds.keep(each.held, sha256)
                except (OSError, DataError) as error:
                    self._tell(each.found, error)
                    continue
                hashed.append((each, sha256))
                yield Source(path=each.held, sha256=sha256, size=each.found.size)

        self._uploading, self._contents.uploaded = sum(t.found.size for t in taken), 0
        try:
            failed = self._contents.upload(sources())
        finally:
            self._uploading = 0
        for each, _ in hashed:
            if each.held in failed:
                self._tell(each.found, failed[each.held])
        return [(each.found, sha256) for each, sha256 in hashed if each.held not in failed]

    def _is_superseded(self, one: _Taken, taken: Sequence[_Taken]) -> bool:
        """Whether the stage has removed a file and left a newer one, before its turn came."""
        newer = [t for t in taken if t.found.made_ns > one.found.made_ns]
        there = [(self._root / t.found.path).exists() for t in newer]
        return any(there) and not (self._root / one.found.path).exists()

    def _tell(self, found: Found, error: Exception) -> None:
        self.problems[one_line(found.path)] = f"not sent: {error}"

    def _note(
        self,
        run: str,
        kept: Sequence[Kept],
        same: Iterable[Kept],
        gone: Iterable[Kept],
        brought: Iterable[tuple[Found, str]],
    ) -> None:
        """Note the next group of a run, and what is not there any more."""
        group = max((each.last for each in kept), default=0) + 1
        for each in gone:
            self._set(each, "gone", Gone.HERE)
        for each in same:
            self._set(each, "last", group)
            self._set(each, "gone", Gone.NO)
        for found, sha256 in brought:
            self._state.run(
                "INSERT INTO checkpoints"
                " (path, sha256, size, mode, made_ns, inode, first, last)"
                " VALUES (?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (path, sha256) DO UPDATE SET"
                " mode = excluded.mode, made_ns = excluded.made_ns, inode = excluded.inode,"
                " last = excluded.last, gone = 0, told = 0, pack = 0",
                *(found.path, sha256, found.size, found.mode, found.made_ns, found.inode),
                *(group, group),
            )

    def _bring_again(self) -> bool:
        """Bring contents to the remote once more that were lost there, or damaged."""
        lost = [k for k in self._kept("pack = 0") if not self._contents.pieces(k.sha256)]
        sources = {self._where(kept): kept for kept in lost}
        failed = self._contents.upload(
            Source(path=path, sha256=kept.sha256, size=kept.size) for path, kept in sources.items()
        )
        for path in failed:  # it is nowhere any more
            self._set(sources[path], "gone", Gone.EVERYWHERE)
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
        unproved = self._kept("proved IS NULL ORDER BY last DESC, made_ns DESC")
        wanted = (p for kept in unproved for p in self._objects(kept) if not self._proofs.how([p]))
        wrong, more = self._proofs.find(wanted) if unproved else (set(), False)
        news = bool(wrong)
        with self._state.transaction():
            if wrong:
                self._make_again(wrong)
            for kept in unproved:
                if how := self._proofs.how(self._objects(kept)):
                    self._set(kept, "proved", time.time())
                    self._set(kept, "how", how)
                    news = True
            news |= self._let_go()
        return news, more

    def look_again(self) -> None:
        """Take for unproved what has been moved to other chunks; forget the proofs of those that
        are not needed any more."""
        self._proofs.keep_only(self._contents.objects())
        for kept in self._kept("proved NOT NULL"):
            if not self._proofs.how(self._objects(kept)):
                self._set(kept, "proved", None)

    def _objects(self, kept: Kept) -> list[str]:
        return list(dict.fromkeys(p.object for p in self._contents.pieces(kept.sha256)))

    def _let_go(self) -> bool:
        """Find what the stage has removed and nobody needs any more; return whether any is."""
        for run in {run_of(kept.path) for kept in self._kept("gone = ?", Gone.HERE)}:
            kept = self._of(run)
            over = self._is_over(run)
            for each in [k for k in kept if k.gone] if over else unneeded(kept, self._sent()):
                self._set(each, "gone", Gone.EVERYWHERE)
        return bool(self._kept("gone = ?", Gone.EVERYWHERE))

    # What is said of them

    def collect(self, seq: int, budget: int) -> list[Message]:
        """Return messages for what is new, and note that pack `seq` says it.

        Call it inside a transaction.
        """
        messages: list[Message] = []
        for kept in self._kept("pack = 0 AND gone != ? ORDER BY rowid", Gone.EVERYWHERE):
            if budget <= 0:
                break
            said = self._say(kept, seq)
            messages += said
            budget -= 512 * len(said)
        for kept in self._kept("gone = ?", Gone.EVERYWHERE):
            messages += [DropFile(path=kept.path)] if kept.pack else []
            self._delete(kept)
        return messages

    def _say(self, kept: Kept, seq: int) -> list[Message]:
        content = self._contents.again(kept.sha256, kept.size)
        if content is None:
            return []  # it was lost, and is brought again
        run = self._of(run_of(kept.path))
        earlier = [each for each in run if each.path == kept.path and each != kept]
        if any(each.pack for each in earlier) and not is_proved(run, kept.last):
            self._set(kept, "told", 1)  # so that the other end can tell whether it has it
            return [] if kept.told else [content]
        self._set(kept, "told", 1)
        self._set(kept, "pack", seq)
        for each in earlier:
            self._delete(each)
        return [content, _put(kept)]

    def live(self) -> Iterator[tuple[str, Path]]:
        """Yield the contents that are needed, each with a file that has it."""
        return ((kept.sha256, self._where(kept)) for kept in self._kept())

    def restate(self) -> Iterator[Content | PutFile]:
        """Yield messages for all that was said."""
        for kept in self._kept("pack > 0"):
            content = self._contents.again(kept.sha256, kept.size)
            if content is not None:
                yield content
                yield _put(kept)

    def send_again(self, lost: Iterable[str]) -> None:
        """Have these contents, which were lost on the remote, brought there again."""
        for sha256 in lost:
            self._state.run(
                "UPDATE checkpoints SET told = 0, pack = 0, proved = NULL, how = ''"
                " WHERE sha256 = ?",
                sha256,
            )

    def said(self) -> set[str]:
        """Paths of the files that were said."""
        return {kept.path for kept in self._kept("pack > 0")}

    def unsent(self) -> int:
        """How many bytes are on their way."""
        return max(0, self._uploading - self._contents.uploaded)

    # What is told of them

    def is_waiting(self) -> bool:
        """Whether there are some of which it is not known whether they are safe."""
        return bool(self._kept("proved IS NULL OR pack > ? OR pack = 0 LIMIT 1", self._sent()))

    def is_behind(self) -> bool:
        """Whether the last round left or failed with some, or some are not known to be safe."""
        return self.unsettled or bool(self.problems) or self.is_waiting()

    def has_any(self, run: str) -> bool:
        """Whether there is anything in a run's folder."""
        return run in self._seen

    def newest_safe(self, run: str) -> Kept | None:
        """Return the newest checkpoint of a run that outlives this machine, or None."""
        return newest_safe(self._of(run), self._sent())

    def index(self) -> CheckpointIndex:
        """Return all that is known, for a person and for programs."""
        sent, runs = self._sent(), dict[str, list[CheckpointFile]]()
        for kept in self._kept("gone != ? ORDER BY made_ns, path", Gone.EVERYWHERE):
            safe = kept.is_safe(sent)
            runs.setdefault(run_of(kept.path), []).append(
                CheckpointFile(
                    path=kept.name,
                    size=kept.size,
                    sha256=kept.sha256,
                    made=kept.made,
                    group=kept.last,
                    said=kept.pack > 0,
                    safe=kept.proved if safe else None,
                    how=kept.how if safe else "",
                )
            )
        return CheckpointIndex(runs={run: tuple(files) for run, files in sorted(runs.items())})

    # The state

    def _kept(self, where: str = "1", *values: object) -> list[Kept]:
        sql = f"SELECT {', '.join(_COLUMNS)} FROM checkpoints WHERE {where}"
        return [_kept_of(row) for row in self._state.rows(sql, *values)]

    def _of(self, run: str) -> list[Kept]:
        below = f"{CHECKPOINTS}/{run}/"
        return self._kept("path >= ? AND path < ?", below, below[:-1] + "0")

    def _set(self, kept: Kept, column: str, value: object) -> None:
        self._state.run(
            f"UPDATE checkpoints SET {column} = ? WHERE path = ? AND sha256 = ?",
            *(value, kept.path, kept.sha256),
        )

    def _delete(self, kept: Kept) -> None:
        self._state.run(
            "DELETE FROM checkpoints WHERE path = ? AND sha256 = ?", kept.path, kept.sha256
        )


def _kept_of(row: Sequence[object]) -> Kept:
    values = dict(zip(_COLUMNS, row, strict=True))
    return Kept(**{**values, "gone": Gone(values["gone"]), "told": bool(values["told"])})  # type: ignore[arg-type]


def _key(found: Found) -> tuple[str, int, int, int, int]:
    return (found.path, found.size, found.made_ns, found.inode, found.mode)


def _put(kept: Kept) -> PutFile:
    return PutFile(path=kept.path, size=kept.size, mode=kept.mode, sha256=kept.sha256)
