"""The ship bundle: one model in one file that can be checked by itself.

A `.ship` file is a ZIP archive, every member stored uncompressed, in this order:

    manifest.json       what the model is, where it comes from, size and SHA-256 of the others
    model.onnx          clips (batch, length) float32 -> logits (batch, classes) float32
    base.safetensors    the model's encoder without its head; fine-tuning can start from it

The archive's comment, its last 64 bytes, is the SHA-256 of every byte before it in hexadecimal, so
that no altered, lost or added byte passes. Nothing varies but the content (times are fixed): one
model makes the same bytes every time. Members are read by their known names, and never unpacked
to a path that the archive names.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import os
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from protocol.errors import DataError
from protocol.names import RunId
from protocol.publish import publishing
from protocol.results import Artifact
from protocol.schema import decode
from trainer.files import writing

VERSION = 1
MANIFEST, MODEL, BASE = "manifest.json", "model.onnx", "base.safetensors"
MEMBERS = (MODEL, BASE)
MAX_MANIFEST_BYTES = 4 * 1024 * 1024
_SEAL_BYTES = 64
_CHUNK = 1024 * 1024
_EPOCH = (1980, 1, 1, 0, 0, 0)


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a bundle says of its model.

    `run_id` is the export run that made it, `arm` the fine-tuning arm it ships, `inputs` the run
    ids of its ancestors by stage. `preprocessing` says what a raw clip goes through and which
    part of it the ONNX graph does itself. `classes` are `corpus/label`, in the order of the
    logits. `data_hash` is the pool's content hash, `code_hash` that of the program's source.
    """

    run_id: str
    stage: str
    arm: str
    inputs: Mapping[str, str]
    preprocessing: Mapping[str, Any]
    config: Mapping[str, Any]
    classes: tuple[str, ...]
    metrics: Mapping[str, float]
    data_hash: str
    code_hash: str
    members: Mapping[str, Artifact] = dataclasses.field(default_factory=dict)
    version: int = VERSION

    def __post_init__(self) -> None:
        if self.version != VERSION:
            raise ValueError(f"version {self.version}; this program reads {VERSION}")
        if RunId.parse(self.run_id).stage != self.stage:
            raise ValueError(f"run id {self.run_id!r} is not one of stage {self.stage!r}")
        if not self.classes or len(set(self.classes)) != len(self.classes):
            raise ValueError("classes are missing, or one stands there twice")

    def to_bytes(self) -> bytes:
        """Return the manifest as JSON. Raises ValueError for NaN and infinities."""
        value = dataclasses.asdict(self)
        return json.dumps(value, indent=1, sort_keys=True, allow_nan=False).encode() + b"\n"

    @classmethod
    def from_bytes(cls, data: bytes) -> Manifest:
        """Parse and check a manifest. Raises ValueError."""
        manifest = decode(cls, json.loads(data))
        if set(manifest.members) != set(MEMBERS):
            raise ValueError(f"the manifest does not list exactly {', '.join(MEMBERS)}")
        return manifest


@dataclass(frozen=True, kw_only=True)
class Bundle:
    """A bundle whose every byte was verified when it was opened."""

    path: Path
    size: int
    sha256: str
    manifest: Manifest

    def read(self, member: str) -> bytes:
        """Return a member's bytes, verified again. Raises DataError when they changed since."""
        try:
            with zipfile.ZipFile(self.path) as archive:
                data = archive.read(member)
        except (OSError, zipfile.BadZipFile, KeyError) as error:
            raise _refused(self.path, str(error)) from error
        if hashlib.sha256(data).hexdigest() != self.manifest.members[member].sha256:
            raise _refused(self.path, f"{member} changed while it was read")
        return data


def write_bundle(path: Path, manifest: Manifest, members: Mapping[str, Path]) -> Bundle:
    """Publish a bundle atomically and return it as `open_bundle` verified it.

    `members` are the files for `MEMBERS`; their sizes and hashes are filled into the manifest.
    Raises DataError when one cannot be read, or the bundle not written.
    """
    content = {name: _read(members[name]) for name in MEMBERS}
    listed = {
        name: Artifact(path=name, size=len(data), sha256=hashlib.sha256(data).hexdigest())
        for name, data in content.items()
    }
    manifest = dataclasses.replace(manifest, members=listed)
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr(_entry(MANIFEST), manifest.to_bytes())
        for name, data in content.items():
            archive.writestr(_entry(name), data)
        archive.comment = b"0" * _SEAL_BYTES
    sealed = buffer.getbuffer()[:-_SEAL_BYTES]
    with writing("write the ship bundle", path), publishing(path) as file:
        file.write(sealed)
        file.write(hashlib.sha256(sealed).hexdigest().encode())
    return open_bundle(path)


def open_bundle(path: Path) -> Bundle:
    """Open a bundle and verify every byte of it.

    Raises DataError when it is missing, cut short, altered, of a newer version, or no bundle.
    """
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            sha256 = _check_seal(file, size)
            with zipfile.ZipFile(file) as archive:
                _check_layout(archive.infolist())
                manifest = Manifest.from_bytes(archive.read(MANIFEST))
                for name in MEMBERS:
                    _check_member(archive, manifest.members[name], name)
    except OSError as error:
        raise _refused(path, error.strerror or str(error)) from error
    except (zipfile.BadZipFile, ValueError, RecursionError, RuntimeError) as error:
        raise _refused(path, str(error)) from error
    return Bundle(path=path, size=size, sha256=sha256, manifest=manifest)


def check(path: Path) -> dict[str, Any]:
    """Verify a bundle and return what it says of itself, as JSON. Raises DataError."""
    bundle = open_bundle(path)
    manifest = dataclasses.asdict(bundle.manifest)
    return {"path": str(path), "size": bundle.size, "sha256": bundle.sha256, **manifest}


def _check_seal(file: IO[bytes], size: int) -> str:
    """Check the seal of a file of `size` bytes; return the SHA-256 of all of it."""
    hasher, left = hashlib.sha256(), size - _SEAL_BYTES
    while left > 0 and (chunk := file.read(min(_CHUNK, left))):
        hasher.update(chunk)
        left -= len(chunk)
    seal = file.read()
    if seal != hasher.hexdigest().encode():
        raise ValueError("cut short, altered, or no ship bundle: its seal does not match")
    hasher.update(seal)
    return hasher.hexdigest()


def _check_layout(entries: Sequence[zipfile.ZipInfo]) -> None:
    """Check, before any content is read, that the members are those that `write_bundle` makes.

    A seal proves that a file is whole, not that its maker meant well.
    """
    names = [entry.filename for entry in entries]
    if names != [MANIFEST, *MEMBERS]:
        raise ValueError(f"its members are {', '.join(map(repr, names[:8]))}: no ship bundle")
    for entry in entries:
        if entry.compress_type != zipfile.ZIP_STORED or entry.compress_size != entry.file_size:
            raise ValueError(f"{entry.filename} is compressed: no ship bundle")
    if entries[0].file_size > MAX_MANIFEST_BYTES:
        raise ValueError(f"the manifest is larger than {MAX_MANIFEST_BYTES} bytes")


def _check_member(archive: zipfile.ZipFile, expected: Artifact, name: str) -> None:
    hasher, size = hashlib.sha256(), 0
    with archive.open(name) as member:
        while chunk := member.read(_CHUNK):
            hasher.update(chunk)
            size += len(chunk)
    if (size, hasher.hexdigest()) != (expected.size, expected.sha256):
        raise ValueError(f"{name} is not the file that the manifest lists")


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        why = error.strerror or str(error)
        raise DataError("write the ship bundle", path=path, why=why) from error


def _entry(name: str) -> zipfile.ZipInfo:
    info = zipfile.ZipInfo(name, date_time=_EPOCH)
    info.external_attr = 0o644 << 16
    info.create_system = 3  # Unix, on every system: the bytes must not depend on it
    return info


def _refused(path: Path, why: str) -> DataError:
    return DataError(
        "read the ship bundle", path=path, why=why, hint="Fetch it again, or export the run anew."
    )
