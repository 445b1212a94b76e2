"""The help of both commands is what is checked in.

After a change that is meant: REGENERATE=1 python -m pytest tests/test_help.py
"""

from __future__ import annotations

import importlib
import os
from pathlib import Path

import pytest

GOLDEN = Path(__file__).parent / "data" / "help"
SYNCD = ["demo", "init", "logs", "results", "run", "sh", "status", "stop", "watch"]
TRAINER = ["check", "export", "finetune", "gate", "pool", "pretrain"]
COMMANDS = [
    "syncd",
    *[f"syncd {name}" for name in SYNCD],
    "trainer",
    *[f"trainer {name}" for name in TRAINER],
    *[f"trainer pool {name}" for name in ("build", "describe", "sample")],
]
MEND = "If it is meant: REGENERATE=1 python -m pytest tests/test_help.py"


@pytest.fixture
def rendered(monkeypatch, capsys):
    """Return a function that renders a command's help, 80 columns wide and plain."""
    for name in ("FORCE_COLOR", "CLICOLOR_FORCE", "SYNCD_FOLDER"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")

    def rendered(command):
        package, *words = command.split()
        assert importlib.import_module(f"{package}.cli").main([*words, "--help"]) == 0
        lines = capsys.readouterr().out.splitlines()
        return "".join(f"{line.rstrip()}\n" for line in lines)

    return rendered


@pytest.mark.parametrize("command", COMMANDS)
def test_help_is_what_is_checked_in(rendered, command):
    path = GOLDEN / f"{command.replace(' ', '-')}.txt"
    found = rendered(command)
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
