"""Tests of trainer/hashing.py."""

from __future__ import annotations

import hashlib
from pathlib import Path

from trainer.hashing import code_hash, file_sha256, tree_sha256


def test_a_file_hashes_as_its_bytes_do(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x" * 100_000)
    assert file_sha256(tmp_path / "a") == hashlib.sha256(b"x" * 100_000).hexdigest()


def test_a_tree_hash_changes_with_a_name_or_a_byte_and_not_with_the_order(tmp_path: Path) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    a.write_text("1")
    b.write_text("2")
    before = tree_sha256(tmp_path, [a, b])
    assert tree_sha256(tmp_path, [b, a]) == before
    b.write_text("3")
    changed = tree_sha256(tmp_path, [a, b])
    b.rename(tmp_path / "c")
    assert len({before, changed, tree_sha256(tmp_path, [a, tmp_path / "c"])}) == 3


def test_the_code_hash_is_one_of_this_source() -> None:
    assert len(code_hash()) == 64
    assert code_hash() == code_hash()
