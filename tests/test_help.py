"""The help of both commands is what is checked in.

After a change that is meant: REGENERATE=1 python -m pytest tests/test_help.py
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

GOLDEN = Path(__file__).parent / "data" / "help"
SYNCD = [
    "bridge",
    "bench",
    "bootstrap",
    "demo",
    "doctor",
    "down",
    "init",
    "logs",
    "results",
    "run",
    "sh",
    "status",
    "stop",
    "up",
    "watch",
]
TRAINER = ["bench", "check", "export", "finetune", "gate", "pool", "pretrain"]
COMMANDS = [
    "syncd",
    *[f"syncd {name}" for name in SYNCD],
    "syncd bench checkpoints",
    "syncd bench link",
    "trainer",
    *[f"trainer {name}" for name in TRAINER],
    "trainer bench loader",
    *[f"trainer pool {name}" for name in ("build", "describe", "sample")],
]
MEND = "If it is meant: REGENERATE=1 python -m pytest tests/test_help.py"


# Renders each command's help in one process of its own: what a test before has left is not there.
RENDER = """
import contextlib, importlib, io, json, sys
helps = {}
for command in json.loads(sys.argv[1]):
    package, *words = command.split()
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert importlib.import_module(f"{package}.cli").main([*words, "--help"]) == 0
    helps[command] = "".join(f"{line.rstrip()}\\n" for line in out.getvalue().splitlines())
print(json.dumps(helps))
"""


@pytest.fixture(scope="module")
def helps() -> dict[str, str]:
    """The help of every command, 80 columns wide and plain."""
    ours = ("SYNCD_", "TRAINER_", "FORCE_COLOR", "CLICOLOR_FORCE")
    environ = {k: v for k, v in os.environ.items() if not k.startswith(ours)}
    done = subprocess.run(
        [sys.executable, "-c", RENDER, json.dumps(COMMANDS)],
        env={**environ, "COLUMNS": "80", "NO_COLOR": "1"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    found: dict[str, str] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("command", COMMANDS)
def test_help_is_what_is_checked_in(helps, command):
    path = GOLDEN / f"{command.replace(' ', '-')}.txt"
    found = helps[command]
    if os.environ.get("REGENERATE"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(found, "utf-8")
    assert path.read_text("utf-8") == found, MEND


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.startswith("syncd")])
def test_help_fits_eighty_columns_and_has_no_escape_codes(command):
    text = (GOLDEN / f"{command.replace(' ', '-')}.txt").read_text("utf-8")
    assert max(map(len, text.splitlines())) <= 80
    assert "\x1b" not in text


@pytest.mark.parametrize("name", ["syncd", "trainer"])
def test_every_command_has_its_help_checked_in(name):
    text = (GOLDEN / f"{name}.txt").read_text("utf-8")
    listed = {
        line.split()[1] for line in text.split("Commands", 1)[1].splitlines()
        if line.startswith("│ ") and line[2].isalpha()
    }  # fmt: skip
    assert listed == {c.split()[1] for c in COMMANDS if c.startswith(f"{name} ")}
