"""Damaged Arrow files are refused or read within their bounds; the interpreter never ends."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest
from arrow_files import tokens, write

READER = Path(__file__).parents[2] / "support" / "damage_reader.py"


def sample(path: Path, kind: str) -> Path:
    """A small file with every kind of column that is read, and some that are not."""
    ids = [[1, 2, 3], None, [], [4] * 9]
    lists = (pa.list_, pa.large_list, pa.list_view, pa.large_list_view)
    columns = {f"ids{i}": tokens(ids, each(pa.int32())) for i, each in enumerate(lists)}
    columns["clip"] = pa.array([[[1.0, 2.0]] * 3] * 4, pa.list_(pa.list_(pa.float32(), 2), 3))
    columns["tensor"] = pa.ExtensionArray.from_storage(
        pa.fixed_shape_tensor(pa.int16(), [2]), pa.array([[1, 2]] * 4, pa.list_(pa.int16(), 2))
    )
    columns["label"] = pa.array([1, 2, 3, 4], pa.uint8())
    columns["word"] = pa.array(["a", "b", "a", None]).dictionary_encode()
    options = pa.ipc.IpcWriteOptions(compression="lz4" if kind == "lz4" else None)
    table = pa.table(columns)
    return write(path, table, stream=kind != "file", rows=3, options=options)


def damage(tmp_path: Path, kind: str, seed: int, copies: int) -> tuple[int, int]:
    """Return how many of `copies` were read, and refused."""
    command = [sys.executable, READER, sample(tmp_path / "whole", kind), tmp_path]
    ended = subprocess.run(
        [*map(str, command), str(seed), str(copies)], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    read, refused = map(int, ended.stdout.split())
    return read, refused


@pytest.mark.parametrize("kind", ["file", "stream", "lz4"])
def test_damage_is_refused_or_read_within_bounds(tmp_path: Path, kind: str) -> None:
    read, refused = damage(tmp_path, kind, 0, 400)
    assert read + refused == 400
    assert read > 20
    assert refused > 100


@pytest.mark.long
@pytest.mark.parametrize("kind", ["file", "stream", "lz4"])
@pytest.mark.parametrize("seed", range(1, 5))
def test_much_damage_is_refused_or_read_within_bounds(tmp_path: Path, kind: str, seed: int) -> None:
    assert sum(damage(tmp_path, kind, seed, 20_000)) == 20_000
