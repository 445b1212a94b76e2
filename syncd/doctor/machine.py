"""Checks of the machine: Python and packages, rclone, memory, GPU, ONNX."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import platform as system
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator

import psutil

from protocol.errors import ExitCode, UserError
from protocol.status import size
from protocol.wire import Role
from syncd.delivery.payload import read_stages
from syncd.doctor.findings import Finding, ok, warning, wrong
from syncd.doctor.patient import Patient
from syncd.platform import memory_limit
from syncd.rclone.binary import find_rclone, rclone_version

LITTLE_MEMORY = 512 * 1024 * 1024
PROGRAM_SECONDS = 60.0
_REQUIREMENT = re.compile(r"(?P<name>[A-Za-z0-9._-]+)>=(?P<version>[0-9.]+)(?P<marker>\s*;.*)?$")
ONNX_STAGES = frozenset({"export", "gate"})
ONNX_PACKAGES = ("onnx", "onnxruntime", "onnxscript")


def check_python(patient: Patient, stop: threading.Event) -> Iterator[Finding]:
    """Python, and the packages that syncd says it needs."""
    told = f"Python {system.python_version()} on {system.system()} {system.machine()}"
    yield ok("python", f"{told}, syncd {importlib.metadata.version('syncd')}")
    lacking = [text for text in importlib.metadata.requires("syncd") or () if not _is_met(text)]
    if lacking:
        todo = f"Install: pip install '{lacking[0]}'" if len(lacking) == 1 else "Install syncd anew"
        yield wrong("packages", f"missing or too old: {', '.join(lacking)}", todo, ExitCode.CONFIG)
    else:
        yield ok("packages", "all that syncd needs are there")


def _is_met(requirement: str) -> bool:
    """Whether a requirement of the form name>=version is met; extras are nobody's need."""
    match = _REQUIREMENT.match(requirement)
    if match is None or match["marker"]:
        return True
    try:
        found = importlib.metadata.version(match["name"])
    except importlib.metadata.PackageNotFoundError:
        return False
    return _numbers(found) >= _numbers(match["version"])


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])


def check_rclone(patient: Patient, stop: threading.Event) -> Iterator[Finding]:
    """The rclone program."""
    path = find_rclone()
    version = ".".join(map(str, rclone_version(path)))
    yield ok("rclone", f"{version}, {path}")


def check_memory(patient: Patient, stop: threading.Event) -> Iterator[Finding]:
    """How much memory there is to be had, by the machine and by a container's limit."""
    memory, limit = psutil.virtual_memory(), memory_limit()
    told = f"{size(memory.available)} of {size(memory.total)} are free"
    if limit is not None and limit < memory.total:
        told += f"; this container may have {size(limit)}"
    if min(memory.available, limit or memory.available) < LITTLE_MEMORY:
        yield warning("memory", told, "End what is not needed, or take a larger machine.")
    else:
        yield ok("memory", told)


def check_gpu(patient: Patient, stop: threading.Event) -> Iterator[Finding]:
    """The GPUs, as the driver and as torch see them; a controller needs none."""
    if patient.role is Role.CONTROLLER:
        yield ok("gpu", "none is needed at this end")
        return
    driver = _driver_gpus()
    if driver:
        yield ok("gpu", "; ".join(driver))
    elif patient.role is None:
        yield ok("gpu", "nvidia-smi shows none; only a worker needs one")
        return
    else:
        yield warning("gpu", "nvidia-smi shows none", "Choose a GPU in the notebook's settings.")
    if importlib.util.find_spec("torch") is None:
        yield ok("torch", "not installed here; a stage may bring its own")
        return
    version, count = _torch()
    if driver and not count:
        yield warning("torch", f"{version} sees no GPU", "Install a build of torch for CUDA.")
    else:
        yield ok("torch", f"{version}, {count} GPUs")


def _driver_gpus() -> list[str]:
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    query = ["--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    done = _run([program, *query])
    return [line.strip() for line in done.splitlines() if line.strip()]


_ASK_TORCH = """
import json, torch
print(json.dumps([torch.__version__, torch.cuda.device_count()]))
"""


def _torch() -> tuple[str, int]:
    """Ask in a process of its own: importing torch takes seconds and hundreds of MiB."""
    answer = _run([sys.executable, "-c", _ASK_TORCH])
    try:
        version, count = json.loads(answer)
        return str(version), int(count)
    except (ValueError, TypeError):
        return "torch, which cannot be imported,", 0


def _run(argv: list[str]) -> str:
    """Return what a program prints, "" when it fails or takes too long."""
    try:
        done = subprocess.run(
            argv, capture_output=True, text=True, timeout=PROGRAM_SECONDS, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout


def check_onnx(patient: Patient, stop: threading.Event) -> Iterator[Finding]:
    """The ONNX packages, where a stage of the payload is likely to need them."""
    if patient.role is not Role.WORKER or patient.layout is None:
        return
    missing = [name for name in ONNX_PACKAGES if importlib.util.find_spec(name) is None]
    try:
        needing = sorted(ONNX_STAGES & read_stages(patient.layout.serve).keys())
    except UserError:
        needing = []  # that there are no stages, or wrong ones, is told by their own check
    if missing and needing:
        told = f"{', '.join(missing)} not installed; {' and '.join(needing)} may need it"
        yield warning("onnx", told, f"pip install {' '.join(missing)}")
    elif missing:
        yield ok("onnx", f"{', '.join(missing)} not installed, and no stage here exports")
    else:
        yield ok("onnx", "installed")
