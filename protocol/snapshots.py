"""Snapshots of `serve/`: a list of files, and an id that is the hash of it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict

from protocol.errors import RefusedError
from protocol.messages import FileEntry, Snapshot
from protocol.names import safe_relative
from protocol.schema import decode, loads

MAX_FILES = 1_000_000


def encode_snapshot(order: int, files: Iterable[FileEntry]) -> Snapshot:
    """Return the snapshot of these files; the same files always give the same id."""
    # Encoded one by one, as they are decoded below: there may be very many.
    listed = (
        json.dumps(asdict(f), separators=(",", ":"), ensure_ascii=True).encode("ascii")
        for f in sorted(files, key=lambda f: f.path)
    )
    blob = b"[" + b",".join(listed) + b"]"
    return Snapshot(order=order, id=hashlib.sha256(blob).hexdigest()[:16], blob=blob)


def each_file(snapshot: Snapshot) -> Iterator[FileEntry]:
    """Yield the files of a snapshot that this end has made, unchecked, without holding them all.

    Raises ValueError when the list is malformed.
    """
    text, decoder, at = snapshot.blob.decode("ascii"), json.JSONDecoder(), 1
    while (following := text[at : at + 1]) != "]":
        value, at = decoder.raw_decode(text, at + (following == ","))
        yield decode(FileEntry, value)


def decode_snapshot(snapshot: Snapshot) -> list[FileEntry]:
    """Return a snapshot's files, every path checked.

    Raises RefusedError when the id is not that of the list, the list is malformed, a path is
    unsafe, stands there twice, or is a file and a folder.
    """
    what = f"read snapshot {snapshot.id}"
    if hashlib.sha256(snapshot.blob).hexdigest()[:16] != snapshot.id:
        raise RefusedError(what, why="its list of files is not the one of its id")
    try:
        value = loads(snapshot.blob)
        if not isinstance(value, list) or len(value) > MAX_FILES:
            raise ValueError("not a list of files")
        value.reverse()
        files = [decode(FileEntry, value.pop()) for _ in range(len(value))]
    except ValueError as error:
        raise RefusedError(what, why=str(error)) from error
    paths = {safe_relative(file.path) for file in files}
    if len(paths) != len(files):
        raise RefusedError(what, why="a path stands in it twice")
    for path in paths:
        parent = path.rpartition("/")[0]
        while parent:
            if parent in paths:
                raise RefusedError(what, why=f"{parent!r} is a file and a folder")
            parent = parent.rpartition("/")[0]
    return files
