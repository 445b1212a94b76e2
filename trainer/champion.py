"""The champion: the ship bundle that a candidate has to beat, kept in the durable store.

    <store>/champion/current.json            the champion, and the one before
    <store>/champion/bundles/<sha256>.ship   their bundles, and nothing else

Promoting publishes the bundle, then `current.json` by rename, then removes what is no longer
named. A crash between two of these steps leaves a valid champion and at most a spare bundle;
promoting again does the rest. Promotions exclude each other by a lock on `champion/lock`, and each
names the champion that its candidate was judged against, so that none replaces a champion that
it never met. A lock does not cross machines that share the store through a synced folder: there
that comparison is the only guard.
"""

from __future__ import annotations

import dataclasses
import shutil
from dataclasses import dataclass
from pathlib import Path

from protocol.errors import DataError, RefusedError
from protocol.publish import make_dirs, publish_json, publishing, remove_leftovers
from trainer.bundle import Bundle, open_bundle
from trainer.files import read_record, writing
from trainer.locks import LOCK_TIMEOUT_S, locked

VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Promotion:
    """One promoted bundle: `path` below `champion/`, its hash, size in bytes, and export run.

    `promoted` is the time in seconds since the epoch, UTC.
    """

    path: str
    sha256: str
    size: int
    run_id: str
    promoted: float


@dataclass(frozen=True, kw_only=True)
class _Current:
    """The content of `current.json`."""

    current: Promotion
    previous: Promotion | None = None
    version: int = VERSION

    def __post_init__(self) -> None:
        if self.version != VERSION:
            raise ValueError(f"version {self.version}; this program reads {VERSION}")
        for promotion in (self.current, self.previous):
            if promotion is not None and promotion.path != _bundle_path(promotion.sha256):
                raise ValueError(
                    f"path {promotion.path!r} is not that of bundle {promotion.sha256}"
                )


@dataclass(frozen=True, kw_only=True)
class Champion:
    """The champion, verified when it was loaded, and the record of the one before."""

    promotion: Promotion
    previous: Promotion | None
    bundle: Bundle


def load_champion(store: Path) -> Champion | None:
    """Return the champion of a store after verifying its bundle; None when there is none yet.

    Raises DataError when `current.json` or the bundle is missing, malformed or altered.
    """
    current = _read_current(store)
    if current is None:
        return None
    promotion = current.current
    path = _folder(store) / promotion.path
    try:
        bundle = open_bundle(path)
    except DataError as error:
        raise DataError("load the champion", path=path, why=error.why, hint=_MEND) from error
    if (bundle.sha256, bundle.manifest.run_id) != (promotion.sha256, promotion.run_id):
        raise DataError(
            "load the champion",
            path=path,
            why=f"it is of run {bundle.manifest.run_id}, not the promoted bundle of "
            f"{promotion.run_id}",
            hint=_MEND,
        )
    return Champion(promotion=promotion, previous=current.previous, bundle=bundle)


def promote(
    store: Path,
    bundle: Bundle,
    *,
    against: str,
    now: float,
    lock_timeout: float = LOCK_TIMEOUT_S,
) -> Promotion:
    """Make `bundle` the champion, durably; `against` is the SHA-256 of the one it was judged
    against, or "" when there was none.

    Promoting the present champion again changes nothing, so a promotion that was interrupted
    can simply be repeated.

    Raises RefusedError when the champion is no longer the one judged against, BusyError when
    another process is promoting for longer than `lock_timeout` seconds, DataError when the store
    is damaged or cannot be written.
    """
    folder = _folder(store)
    with writing("promote the champion", folder):
        make_dirs(folder / "bundles")
        with locked(folder / "lock", timeout=lock_timeout):
            before = _read_current(store)
            if before is not None and before.current.sha256 == bundle.sha256:
                _remove_unnamed(folder, before)
                return before.current
            _check_judged(folder, before, against)
            after = _replace(folder, bundle, before, now=now)
            _remove_unnamed(folder, after)
            return after.current


_MEND = "Restore it from a copy, or move current.json away to start without a champion."


def _folder(store: Path) -> Path:
    return store / "champion"


def _bundle_path(sha256: str) -> str:
    return f"bundles/{sha256}.ship"


def _read_current(store: Path) -> _Current | None:
    path = _folder(store) / "current.json"
    return read_record(_Current, path, what="load the champion", hint=_MEND)


def _check_judged(folder: Path, before: _Current | None, against: str) -> None:
    current = "" if before is None else before.current.sha256
    if current != against:
        raise RefusedError(
            "promote the champion",
            path=folder,
            why=f"judged against {against[:12] or 'no champion'}, but the champion is now "
            f"{current[:12] or 'none'}",
            hint="Judge again: run the gate once more.",
        )


def _replace(folder: Path, bundle: Bundle, before: _Current | None, *, now: float) -> _Current:
    target = folder / _bundle_path(bundle.sha256)
    with open(bundle.path, "rb") as source, publishing(target) as file:
        shutil.copyfileobj(source, file)
    copied = open_bundle(target)
    if copied.sha256 != bundle.sha256:
        raise DataError("promote the champion", path=bundle.path, why="changed since it was judged")
    promotion = Promotion(
        path=_bundle_path(bundle.sha256),
        sha256=bundle.sha256,
        size=bundle.size,
        run_id=bundle.manifest.run_id,
        promoted=now,
    )
    after = _Current(current=promotion, previous=None if before is None else before.current)
    publish_json(folder / "current.json", dataclasses.asdict(after))
    return after


def _remove_unnamed(folder: Path, current: _Current) -> None:
    named = {p.path for p in (current.current, current.previous) if p is not None}
    remove_leftovers(folder)
    remove_leftovers(folder / "bundles")
    for path in (folder / "bundles").glob("*.ship"):
        if f"bundles/{path.name}" not in named:
            path.unlink()
