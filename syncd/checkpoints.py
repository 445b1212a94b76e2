"""Keeps `in/checkpoints.json` at the worker: what is in the durable store, and what of it is safe.

What there is follows from the files that were looked at last (`delivery.files`) and what was proved
of the chunks that hold them (`delivery.proofs`), so it costs nothing for runs whose checkpoints are
gone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict
from pathlib import Path

from protocol.checkpoints import (
    CHECKPOINTS,
    CheckpointFile,
    CheckpointIndex,
    Proof,
    is_superseded,
    newest_safe,
)
from protocol.publish import publish_json
from syncd.delivery.contents import Contents
from syncd.delivery.files import SentFile
from syncd.delivery.link import Link
from syncd.delivery.proofs import Proofs


class Checkpoints:
    """Those of this worker. One thread does rounds; any may ask for what is safe."""

    def __init__(
        self,
        *,
        path: Path,
        store: Path,
        files: Callable[[str], Iterable[SentFile]],
        contents: Contents,
        proofs: Proofs,
        link: Link,
        written: Callable[[], None],
    ) -> None:
        """`path` is where the index is written, which `written` is told; `store` where the runs'
        folders are; `files` gives what is known of the files below a folder."""
        self._path = path
        self._store = store
        self._files = files
        self._contents = contents
        self._proofs = proofs
        self._link = link
        self._tell_written = written
        self._runs: Mapping[str, tuple[CheckpointFile, ...]] = {}
        self._written: CheckpointIndex | None = None
        self.unproved = False  # whether something that is on the remote was not proved yet

    def safe(self, run_id: str) -> CheckpointFile | None:
        """Return the newest safe file of a run, None when there is none."""
        return newest_safe(self._runs.get(run_id, ()))

    def is_needed(self, path: str) -> bool:
        """Whether a checkpoint that is gone here is what a new worker would go on from."""
        run_id, _, name = path.removeprefix(CHECKPOINTS).partition("/")
        files = self._runs.get(run_id, ())
        made = next((file.made for file in files if file.name == name), None)
        if made is None:
            return False
        folder = self._store / run_id
        return not is_superseded(made, (file for file in files if (folder / file.name).exists()))

    def round(self) -> set[str]:
        """Prove what is on the remote and write the index; return which chunks are damaged.

        May take long. Raises RemoteError when the remote cannot be reached, OSError when the index
        cannot be written.
        """
        self._look()
        damaged: set[str] = set()
        # The newest first: what is asked for is what a run would lose now.
        for file in sorted(self._files(CHECKPOINTS), key=lambda file: file.made, reverse=True):
            if self._is_said(file):
                damaged |= self._proofs.check(self._chunks(file.sha256))
        self._look()
        return damaged

    def _look(self) -> None:
        """See what there is, and write the index if it has changed."""
        runs: dict[str, list[CheckpointFile]] = {}
        for file in sorted(self._files(CHECKPOINTS), key=lambda file: (file.made, file.path)):
            run_id, _, name = file.path.removeprefix(CHECKPOINTS).partition("/")
            if name:
                runs.setdefault(run_id, []).append(self._entry(file, name))
        self._runs = {run_id: tuple(files) for run_id, files in sorted(runs.items())}
        self.unproved = any(
            each.said and each.proof is None for files in runs.values() for each in files
        )
        index = CheckpointIndex(runs=self._runs)
        if index != self._written and (self._runs or self._path.exists()):
            publish_json(self._path, asdict(index))
            self._tell_written()
        self._written = index

    def _entry(self, file: SentFile, name: str) -> CheckpointFile:
        proof, since = self._proved(file)
        return CheckpointFile(
            name=name,
            size=file.size,
            sha256=file.sha256,
            made=file.made,
            said=self._is_said(file),
            proof=proof,
            since=since,
        )

    def _proved(self, file: SentFile) -> tuple[Proof | None, float | None]:
        """How, and since when, all that holds a file's bytes is whole: by the weakest and the
        latest of what was found of its chunks."""
        chunks = self._chunks(file.sha256)
        if not chunks:  # it was said in a pack, which who has read it acknowledges
            heard = 0 < file.pack <= self._link.acked()
            return (Proof.STORED, file.made) if heard else (None, None)
        found = [self._proofs.of(chunk) for chunk in chunks]
        known = [each for each in found if each is not None]
        if len(known) < len(found):
            return None, None
        order = list(Proof)
        proof = max((proof for proof, _ in known), key=order.index)
        return proof, max(since for _, since in known)

    def _is_said(self, file: SentFile) -> bool:
        return 0 < file.pack <= self._link.sent()

    def _chunks(self, sha256: str) -> Collection[str]:
        return dict.fromkeys(piece.object for piece in self._contents.pieces(sha256))
