"""What the bridge tells the person: what to paste at the worker, when, and what to mind."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from pathlib import Path

from syncd.bridge import OBJECTS, SERVE, USER
from syncd.config import Key
from syncd.rclone.address import Address

FOLDER = "syncd"
WATCH = f"syncd watch --folder {FOLDER}"


def worker_remote(url: str, password: str) -> str:
    """Return the remote that a worker is given: the URL of the objects, credentials and all."""
    return Address(f"{url}/{OBJECTS}", USER, password).text()


IN_A_NOTEBOOK = (
    "For a notebook's VM: `syncd bootstrap --platform colab` (kaggle, jupyter) makes the cell.\n"
)


def first_text(
    remote: str,
    key: Key | None,
    *,
    show_key: bool,
    key_path: Path,
    fallback: Sequence[str] = (),
) -> str:
    """Return what to do for a worker in a notebook, and what to paste at one that has a shell.

    It makes a folder the worker's end, which keeps what is given to it, and starts the daemon. The
    key is asked for there, unless `show_key`.
    """
    lines = [f"export SYNCD_REMOTE={shlex.quote(remote)}"]
    where = ""
    if fallback:
        lines.append(f"export SYNCD_FALLBACK={shlex.quote(','.join(fallback))}")
    if key is not None and show_key:
        lines.append(f"export SYNCD_KEY={shlex.quote(' '.join(key.text().split()))}")
    elif key is not None:
        which = "the first line of" if key.previous else "the line in"
        where = (
            f"It asks for the key, which is {which} {key_path}\n"
            "(`syncd bridge --show --show-key` prints it with the key in it).\n"
        )
        lines.append("read -rsp 'key: ' SYNCD_KEY && export SYNCD_KEY")
    return (
        f"{IN_A_NOTEBOOK}\n"
        "On a machine with a shell, where syncd must be installed (`pip install .` in a checkout), "
        "paste:\n\n"
        f"{_block([*lines, _start(sealed=key is not None)])}\n"
        f"{where}The worker keeps them in the folder {FOLDER}: later `{WATCH}` is enough.\n"
    )


def brief_text() -> str:
    """Return what is told where the password may be kept: what prints the rest."""
    return (
        f"{IN_A_NOTEBOOK}"
        "For a machine with a shell: `syncd bridge --show` prints what to paste there.\n"
    )


def changed_text(remote: str, *, sealed: bool = True) -> str:
    """Return what to do at a worker that knows another URL, and has no second remote."""
    in_shell = f"export SYNCD_REMOTE={shlex.quote(remote)}; {_start(sealed=sealed)}"
    return (
        f"{_CHANGED} At a worker with a shell, stop `syncd watch` (its stages go on), and paste:"
        f"\n\n{_block([in_shell])}"
    )


def brief_changed_text() -> str:
    """Return the same where the password may be kept."""
    return (
        f"{_CHANGED} At a worker with a shell, stop `syncd watch` (its stages go on), and paste "
        "what `syncd bridge --show` prints.\n"
    )


_CHANGED = (
    "The URL has changed. In a notebook, run the cell that `syncd bootstrap` now makes: it moves "
    "the worker."
)


def _start(*, sealed: bool) -> str:
    unsealed = "" if sealed else " --unsealed"
    return f"syncd init --role worker{unsealed} --folder {FOLDER} && {WATCH}"


def json_line(url: str, password_file: Path) -> str:
    """Return one line of JSON: where the bridge is reached, and where its password stands."""
    return json.dumps(
        {
            "url": url,
            OBJECTS: f"{url}/{OBJECTS}",
            SERVE: f"{url}/{SERVE}",
            "user": USER,
            "password_file": str(password_file),
        }
    )


def _block(lines: list[str]) -> str:
    return "".join(f"    {line}\n" for line in lines)
