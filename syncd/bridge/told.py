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


def first_text(
    remote: str,
    key: Key | None,
    *,
    show_key: bool,
    key_path: Path,
    fallback: Sequence[str] = (),
) -> str:
    """Return what to paste at a worker, in a shell or in a notebook's cell.

    It makes a folder the worker's end, which keeps what is given to it, and starts the daemon. The
    key is asked for there, so that no notebook keeps it, unless `show_key`.
    """
    in_shell, in_cell = [f"export SYNCD_REMOTE={shlex.quote(remote)}"], [_python(remote)]
    where = ""
    if fallback:
        listed = ",".join(fallback)
        in_shell.append(f"export SYNCD_FALLBACK={shlex.quote(listed)}")
        in_cell.append(f'os.environ["SYNCD_FALLBACK"] = {json.dumps(listed)}')
    if key is not None and show_key:
        text = " ".join(key.text().split())
        in_shell.append(f"export SYNCD_KEY={shlex.quote(text)}")
        in_cell.append(f'os.environ["SYNCD_KEY"] = {json.dumps(text)}')
    elif key is not None:
        where = (
            f"They ask for the key, which is the line in {key_path}\n"
            "(`syncd bridge --show --show-key` prints them with the key in them).\n"
        )
        in_shell.append("read -rsp 'key: ' SYNCD_KEY && export SYNCD_KEY")
        in_cell.insert(0, "import getpass")
        in_cell.append('os.environ["SYNCD_KEY"] = getpass.getpass("key: ")')
    start = _start(sealed=key is not None)
    return (
        "Paste at the worker, where syncd must be installed (`pip install .` in a checkout), in a "
        "shell:\n\n"
        f"{_block([*in_shell, start])}\n"
        f"or in a notebook's cell:\n\n{_block([*in_cell, f'!{start}'])}\n"
        f"{where}The worker keeps them in the folder {FOLDER}: later `{WATCH}` is enough.\n"
    )


def changed_text(remote: str, *, sealed: bool = True) -> str:
    """Return what to do at a worker that knows another URL, and has no second remote."""
    start = _start(sealed=sealed)
    in_shell = f"export SYNCD_REMOTE={shlex.quote(remote)}; {start}"
    return (
        "The URL has changed. Stop `syncd watch` at the worker (its stages go on), and paste:\n\n"
        f"{_block([in_shell])}\n"
        f"or in a notebook's cell:\n\n{_block([_python(remote), f'!{start}'])}"
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


def _python(remote: str) -> str:
    return f'import os; os.environ["SYNCD_REMOTE"] = {json.dumps(remote)}'


def _block(lines: list[str]) -> str:
    return "".join(f"    {line}\n" for line in lines)
