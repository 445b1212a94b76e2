"""What a worker says of its checkpoints: contents as they come, and groups whole.

The files of a group, and the group itself, are said in one pack: whoever takes over finds all of it
or nothing. So it is never left with some files of this group and, under other names, some of that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from protocol.checkpoints import CheckpointFile, CheckpointGroup, CheckpointIndex
from protocol.messages import CheckpointsGrouped, Content, DropFile, Message, PutFile
from syncd.delivery.contents import Contents
from syncd.delivery.files import run_of
from syncd.delivery.groups import (
    Gone,
    Group,
    Kept,
    is_proved,
    is_whole,
    may_be_said,
    members,
    replaced,
    safe_groups,
)
from syncd.delivery.kept import KeptFiles


class CheckpointSayings:
    """Those of a worker; its cursors are in the state."""

    def __init__(
        self,
        kept: KeptFiles,
        contents: Contents,
        is_over: Callable[[str], bool],
    ) -> None:
        """`is_over` says of a run id whether that run has ended."""
        self._kept = kept
        self._contents = contents
        self._is_over = is_over

    def collect(self, seq: int, budget: int) -> list[Message]:
        """Return messages for what is new, and note that pack `seq` says it."""
        messages: list[Message] = []
        for kept in self._kept.where("told = 0 AND gone != ? ORDER BY rowid", Gone.EVERYWHERE):
            content = self._contents.again(kept.sha256, kept.size)
            if content is None:
                continue  # it was lost, and is brought again
            if budget <= 0:
                break
            messages.append(content)
            self._kept.set(kept, told=1)
            budget -= 512
        told = {message.sha256 for message in messages if isinstance(message, Content)}
        for run in self._kept.runs():
            messages += self._say_groups(run, seq, told)
        for kept in self._kept.where("gone = ?", Gone.EVERYWHERE):
            messages += [DropFile(path=kept.path)] if kept.pack else []
            self._kept.delete(kept)
            self._kept.forget_groups(run_of(kept.path))
        return messages

    def _say_groups(self, run: str, seq: int, told: set[str]) -> Iterator[Message]:
        """Yield what names the groups of a run that can be; `told` are contents of this pack."""
        for group in self._kept.groups(run):
            if group.pack <= 0 and self._may_be_said(run, group):
                yield from self._say(run, group, seq, told)

    def _may_be_said(self, run: str, group: Group) -> bool:
        files, groups = self._kept.of(run), self._kept.groups(run)
        if any(
            not each.told or self._contents.again(each.sha256, each.size) is None
            for each in members(files, group.number)
        ):
            return False
        if may_be_said(files, groups, group):
            return True
        # Nobody goes on with a run that is over: what it has left is what there is of it.
        last = self._is_over(run) and group == groups[-1]
        return last and is_whole(files, group) and is_proved(files, group)

    def _say(self, run: str, group: Group, seq: int, told: set[str]) -> Iterator[Message]:
        files, newest = self._kept.of(run), self._kept.groups(run)[-1].number
        for kept in replaced(files, group):
            self._kept.delete(kept)
        held = members(files, group.number)
        for kept in held:
            if kept.pack and kept.until >= 0:
                continue
            content = self._contents.again(kept.sha256, kept.size)
            if content and kept.sha256 not in told:
                yield content
            yield self._put(kept, newest, pack=kept.pack or seq)
        for kept in self._kept.of(run):
            if kept.pack and kept.until == 0 and kept.last < group.number:
                yield self._put(kept, newest, pack=kept.pack)
        yield CheckpointsGrouped(run_id=run, number=group.number, files=group.files)
        self._kept.set_group(run, group, seq)
        self._kept.forget_groups(run)

    def _put(self, kept: Kept, newest: int, *, pack: int) -> PutFile:
        put = _put_of(kept, newest)
        self._kept.set(kept, pack=pack, until=put.until)
        return put

    def restate(self) -> Iterator[Message]:
        """Yield messages for all that was said."""
        for run in self._kept.runs():
            yield from self._restate(run)
        known = set(self._kept.runs())
        for kept in self._kept.where("pack > 0"):
            if run_of(kept.path) not in known:
                yield from self._again(kept, PutFile(**_file(kept)))

    def _restate(self, run: str) -> Iterator[Message]:
        files, groups = self._kept.of(run), self._kept.groups(run)
        for kept in files:
            if kept.pack:
                said = (
                    PutFile(**_file(kept)) if kept.until < 0 else _put_of(kept, groups[-1].number)
                )
                yield from self._again(kept, said)
        for group in groups:
            if group.pack > 0 and is_whole(files, group):
                yield CheckpointsGrouped(run_id=run, number=group.number, files=group.files)

    def _again(self, kept: Kept, said: PutFile) -> Iterator[Message]:
        content = self._contents.again(kept.sha256, kept.size)
        if content is not None:
            yield content
            yield said


def _file(kept: Kept) -> dict[str, Any]:
    return {"path": kept.path, "size": kept.size, "mode": kept.mode, "sha256": kept.sha256}


def _put_of(kept: Kept, newest: int) -> PutFile:
    """Return the message for a file of a run of which `newest` is the newest group."""
    until = kept.last if kept.last < newest else 0
    return PutFile(**_file(kept), first=kept.first, until=until)


def index_of(kept_files: KeptFiles, sent: int) -> CheckpointIndex:
    """Return all that is known of checkpoints, packs up to `sent` being on the remote."""
    runs: dict[str, list[CheckpointFile]] = {}
    groups: dict[str, tuple[CheckpointGroup, ...]] = {}
    safe: set[tuple[str, str]] = set()
    for run in kept_files.runs():
        files, known = kept_files.of(run), kept_files.groups(run)
        good = safe_groups(files, known, sent)
        numbers = {group.number for group in good}
        safe |= {(f.path, f.sha256) for f in files if any(f.first <= n <= f.last for n in numbers)}
        groups[run] = tuple(_group_of(group, safe=group.number in numbers) for group in known)
    for kept in kept_files.where("gone != ? ORDER BY made_ns, path", Gone.EVERYWHERE):
        runs.setdefault(run_of(kept.path), []).append(
            _file_of(kept, safe=(kept.path, kept.sha256) in safe)
        )
    return CheckpointIndex(
        runs={run: tuple(files) for run, files in sorted(runs.items())},
        groups={run: found for run, found in groups.items() if run in runs or found[-1].missing},
    )


def _group_of(group: Group, *, safe: bool) -> CheckpointGroup:
    return CheckpointGroup(number=group.number, files=group.files, missing=group.missing, safe=safe)


def _file_of(kept: Kept, *, safe: bool) -> CheckpointFile:
    return CheckpointFile(
        path=kept.name,
        size=kept.size,
        sha256=kept.sha256,
        made=kept.made,
        group=kept.last,
        said=kept.pack > 0,
        safe=kept.proved if safe else None,
        how=kept.how if safe else "",
    )
