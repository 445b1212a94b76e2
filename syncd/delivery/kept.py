"""The checkpoint files that were brought away, and their groups, in the state."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields

from syncd.delivery.files import CHECKPOINTS, Found
from syncd.delivery.groups import Gone, Group, Kept, is_whole
from syncd.state import State

_COLUMNS = [field.name for field in fields(Kept)]


class KeptFiles:
    """Those of a worker. Their changes belong into transactions of the caller."""

    def __init__(self, state: State) -> None:
        self._state = state

    def where(self, where: str = "1", *values: object) -> list[Kept]:
        """Return files by a condition in SQL."""
        sql = f"SELECT {', '.join(_COLUMNS)} FROM checkpoints WHERE {where}"
        return [_kept_of(row) for row in self._state.rows(sql, *values)]

    def of(self, run: str) -> list[Kept]:
        """Return the files of a run."""
        below = f"{CHECKPOINTS}/{run}/"
        return self.where("path >= ? AND path < ?", below, below[:-1] + "0")

    def set(self, kept: Kept, **values: object) -> None:
        """Change columns of a file."""
        names = ", ".join(f"{name} = ?" for name in values)
        self._state.run(
            f"UPDATE checkpoints SET {names} WHERE path = ? AND sha256 = ?",
            *(*values.values(), kept.path, kept.sha256),
        )

    def delete(self, kept: Kept) -> None:
        """Forget a file."""
        self._state.run(
            "DELETE FROM checkpoints WHERE path = ? AND sha256 = ?", kept.path, kept.sha256
        )

    def groups(self, run: str) -> list[Group]:
        """Return the groups of a run, the oldest first."""
        rows = self._state.rows(
            "SELECT number, files, size, brought, missing, pack FROM checkpoint_groups"
            " WHERE run = ? ORDER BY number",
            run,
        )
        return [
            Group(
                number=number,
                files=files,
                size=size,
                brought=brought,
                missing=json.loads(missing),
                pack=pack,
            )
            for number, files, size, brought, missing, pack in rows
        ]

    def runs(self) -> list[str]:
        """Return the runs of which there is a group."""
        rows = self._state.rows("SELECT DISTINCT run FROM checkpoint_groups ORDER BY run")
        return [str(run) for (run,) in rows]

    def note_group(
        self,
        run: str,
        same: Iterable[Kept],
        brought: Sequence[tuple[Found, str]],
        missing: Mapping[str, str],
    ) -> None:
        """Note the next group of a run: files of earlier ones, and what was brought for it."""
        group = self._next_group(run)
        for each in same:
            self.set(each, last=group, gone=Gone.NO)
        for found, sha256 in brought:
            self._state.run(
                "INSERT INTO checkpoints"
                " (path, sha256, size, mode, made_ns, inode, first, last)"
                " VALUES (?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (path, sha256) DO UPDATE SET"
                " mode = excluded.mode, made_ns = excluded.made_ns, inode = excluded.inode,"
                " last = excluded.last, gone = 0, until = -1",
                *(found.path, sha256, found.size, found.mode, found.made_ns, found.inode),
                *(group, group),
            )
        files, before = [k for k in self.of(run) if k.last == group], self.groups(run)[-1:]
        self._state.run(
            "INSERT INTO checkpoint_groups (run, number, files, size, brought, missing)"
            " VALUES (?, ?, ?, ?, ?, ?)",
            *(run, group, len(files), sum(each.size for each in files)),
            sum(each.brought for each in before) + sum(found.size for found, _ in brought),
            json.dumps(dict(missing)),
        )

    def _next_group(self, run: str) -> int:
        """Numbers go on from those of the workers before this one, which others know."""
        row = self._state.row(
            "SELECT MAX((SELECT COALESCE(MAX(number), 0) FROM checkpoint_groups WHERE run = ?),"
            " (SELECT COALESCE(MAX(number), 0) FROM remote_groups WHERE run = ?))",
            *(run, run),
        )
        known = max((each.last for each in self.of(run)), default=0)
        return max(int(row[0]) if row else 0, known) + 1

    def set_group(self, run: str, group: Group, pack: int) -> None:
        """Note which pack says a group."""
        self._state.run(
            "UPDATE checkpoint_groups SET pack = ? WHERE run = ? AND number = ?",
            *(pack, run, group.number),
        )

    def forget_groups(self, run: str) -> None:
        """Forget the groups that nobody goes on from any more, but for the newest of all: those
        that are not whole, and those that others were said instead of."""
        files, groups = self.of(run), self.groups(run)
        said = max((group.number for group in groups if group.pack), default=0)
        for group in groups[:-1]:
            if not is_whole(files, group) or (group.pack == 0 and group.number < said):
                self._state.run(
                    "DELETE FROM checkpoint_groups WHERE run = ? AND number = ?", run, group.number
                )

    def lose(self, sha256: str) -> None:
        """Have files of this content, and the groups that they are in, said again."""
        for kept in self.where("sha256 = ?", sha256):
            self.set(kept, told=0, pack=0, proved=None, how="")
            self._state.run(
                "UPDATE checkpoint_groups SET pack = -1"
                " WHERE run = ? AND pack != 0 AND number BETWEEN ? AND ?",
                *(kept.path.split("/")[2], kept.first, kept.last),
            )


def _kept_of(row: Sequence[object]) -> Kept:
    values = dict(zip(_COLUMNS, row, strict=True))
    return Kept(**{**values, "gone": Gone(values["gone"]), "told": bool(values["told"])})  # type: ignore[arg-type]
