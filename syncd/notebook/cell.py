"""The cell and the notebook around it."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from protocol.durations import DURATION_HINT, parse_duration
from protocol.errors import UsageError
from syncd.config import Key
from syncd.notebook.sealed import lock, secret_of

LINE = 96


def check_idle_time(what: str, text: str) -> None:
    """Raise UsageError for a --stop-when-idle that is no duration, before a VM finds that out."""
    if text and parse_duration(text) is None:
        raise UsageError(what, why=f"--stop-when-idle {text!r} is no time", hint=DURATION_HINT)


class Platform(StrEnum):
    """Whose notebooks they are."""

    COLAB = "colab"
    KAGGLE = "kaggle"
    JUPYTER = "jupyter"


# Where the worker's folder is. Not in /kaggle/working: Kaggle keeps that as the notebook's output,
# for all who may see it, and the key is in the folder.
FOLDERS = {
    Platform.COLAB: "/content/syncd",
    Platform.KAGGLE: "/kaggle/temp/syncd",
    Platform.JUPYTER: "~/syncd",
}
SECRETS = {
    Platform.COLAB: "Put the key into Colab's secrets (the key symbol at the left) as SYNCD_KEY, "
    "and let the notebook have it; else the cell asks for it.",
    Platform.KAGGLE: "Put the key into Kaggle's secrets (Add-ons, Secrets) as SYNCD_KEY, attach "
    "it, and switch the internet on; else the cell asks for it.",
    Platform.JUPYTER: "The cell asks for the key, or takes it from the environment's SYNCD_KEY.",
}
_METADATA: dict[Platform, dict[str, Any]] = {
    Platform.COLAB: {"accelerator": "GPU", "colab": {"provenance": [], "gpuType": "T4"}},
    Platform.KAGGLE: {
        "kaggle": {"accelerator": "gpu", "isGpuEnabled": True, "isInternetEnabled": True}
    },
    Platform.JUPYTER: {},
}


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What a cell is made for. `remotes` are as the worker reaches them, in order; `rclone` is the
    text of the configuration that they need; `hint` is what to do when none of them answers."""

    platform: Platform
    remotes: tuple[str, ...]
    rclone: str = ""
    folder: str = ""
    trainer: bool = True
    stop_when_idle: str = ""
    hint: str = ""


def cell_text(wanted: Wanted, key: Key | None) -> str:
    """Return the one cell. The same `wanted` gives another text each time, which does the same."""
    locked = lock(secret_of(key), {"remotes": wanted.remotes, "rclone": wanted.rclone})
    options = {
        "shared": key.folder if key else "",  # the folder's id, which is no secret
        "folder": wanted.folder or FOLDERS[wanted.platform],
        "trainer": wanted.trainer,
        "stop_when_idle": wanted.stop_when_idle,
        "hint": wanted.hint,
    }
    secret = "It holds the remote's address and password, locked by the key." if key else _UNSEALED
    listed = "".join(f"    {name!r}: {value!r},\n" for name, value in options.items())
    return (
        "# syncd: makes this machine the worker of a shared folder and shows how it is. Run it\n"
        f"# and leave it running. Made by `syncd bootstrap`.\n# {secret}\n"
        f"{_code()}\n\n"
        f"SYNCD_OPTIONS = {{\n{listed}}}\n"
        f"SYNCD_LOCKED = (\n{_folded(locked)})\n"
        "syncd_start(SYNCD_LOCKED, SYNCD_OPTIONS)\n"
    )


_UNSEALED = "THERE IS NO KEY: whoever reads it can run code on it."


def notebook(platform: Platform, cell: str) -> bytes:
    """Return a notebook (nbformat 4.5) of that cell, with a GPU where the platform has a choice."""
    about = (
        "Run the cell below and leave it running: it makes this machine the worker of your shared "
        f"folder. {SECRETS[platform]}"
    )
    cells: list[dict[str, Any]] = [
        {"cell_type": "markdown", "id": "about", "metadata": {}, "source": _lines(about)},
        {
            "cell_type": "code",
            "id": "syncd",
            "metadata": {},
            "execution_count": None,
            "outputs": [],
            "source": _lines(cell.rstrip("\n")),
        },
    ]
    metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
        **_METADATA[platform],
    }
    whole = {"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(whole, indent=1, ensure_ascii=False).encode("utf-8") + b"\n"


def _code() -> str:
    """Return the text of `pasted.py` without its docstring."""
    text = Path(__file__).with_name("pasted.py").read_text("utf-8")
    return re.sub(r'\A""".*?"""\n+', "", text, flags=re.DOTALL).rstrip("\n")


def _folded(text: str) -> str:
    parts = [text[at : at + LINE - 8] for at in range(0, len(text), LINE - 8)]
    return "".join(f'    "{part}"\n' for part in parts)


def _lines(text: str) -> Sequence[str]:
    return text.splitlines(keepends=True)
