"""The cell is Python that any VM can run, holds nothing in clear, and makes a notebook."""

from __future__ import annotations

import ast
import json
import re
import sys
from pathlib import Path

import pytest

import syncd.notebook.pasted
import syncd.notebook.start
from syncd.config import Key
from syncd.notebook.cell import FOLDERS, Platform, Wanted, cell_text, notebook

SECRET = "https://syncd:hunter2@example.org/objects"
WANTED = Wanted(platform=Platform.COLAB, remotes=(SECRET, "drive:x"), rclone="token = hunter3\n")


def _modules(text: str) -> set[str]:
    nodes = list(ast.walk(ast.parse(text)))
    plain = {a.name for node in nodes if isinstance(node, ast.Import) for a in node.names}
    return plain | {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}


@pytest.mark.parametrize("platform", Platform)
def test_the_cell_needs_the_standard_library_alone(platform: Platform) -> None:
    wanted = Wanted(platform=platform, remotes=(SECRET,))
    roots = {name.partition(".")[0] for name in _modules(cell_text(wanted, Key.new()))}
    assert roots - sys.stdlib_module_names == {"google", "kaggle_secrets"}


def test_what_it_fetches_first_needs_no_more() -> None:
    text = Path(syncd.notebook.start.__file__).read_text()
    roots = {name.partition(".")[0] for name in _modules(text)}
    assert roots - sys.stdlib_module_names == {"google", "IPython"}


def test_nothing_secret_stands_in_it() -> None:
    key = Key.new()
    text = cell_text(WANTED, key)
    assert not re.search("hunter|example.org|drive:x", text)
    assert key.text().split(".")[2].strip() not in text


def test_it_says_when_there_is_no_key() -> None:
    assert "THERE IS NO KEY" in cell_text(WANTED, None)
    assert "THERE IS NO KEY" not in cell_text(WANTED, Key.new())


def test_its_lines_are_short_enough_to_be_read() -> None:
    assert max(map(len, cell_text(WANTED, Key.new()).splitlines())) <= 100


def test_kaggle_keeps_no_key_with_the_output() -> None:
    assert not FOLDERS[Platform.KAGGLE].startswith("/kaggle/working")


@pytest.mark.parametrize("platform", Platform)
def test_a_notebook_holds_the_cell_as_it_is(platform: Platform) -> None:
    cell = cell_text(WANTED, Key.new())
    found = json.loads(notebook(platform, cell))
    assert (found["nbformat"], found["nbformat_minor"]) == (4, 5)
    kinds = [each["cell_type"] for each in found["cells"]]
    assert kinds == ["markdown", "code"]
    assert "".join(found["cells"][1]["source"]) + "\n" == cell
