"""Tests of trainer/loader/arrow.py."""

from __future__ import annotations

import gzip
import mmap
import os
import resource
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet
import pytest
from arrow_files import streamed, tokens, write

from protocol.errors import DataError
from trainer.loader.arrow import open_shard

BATCH = pa.record_batch({"ids": tokens([[1, 2], [], [3]]), "text": ["a", "b", "c"]})


def read(path: Path) -> list[list[int]]:
    shard = open_shard(path)
    return [row for batch in shard.batches({"ids"}) for row in batch.column("ids").to_pylist()]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", ["a.arrow", "a.arrows", "a.parquet", "a"])
def test_the_format_is_told_by_the_bytes_and_not_by_the_name(
    tmp_path: Path, name: str, stream: bool
) -> None:
    path = write(tmp_path / name, BATCH, BATCH, stream=stream)
    assert read(path) == [[1, 2], [], [3]] * 2


def test_feather_of_version_2_is_an_arrow_file(tmp_path: Path) -> None:
    path = tmp_path / "a.feather"
    pyarrow.feather.write_feather(pa.table(BATCH), path, compression="uncompressed")
    assert read(path) == [[1, 2], [], [3]]


@pytest.mark.parametrize("stream", [False, True])
def test_buffers_are_views_of_the_mapping_in_both_formats(tmp_path: Path, stream: bool) -> None:
    shard = open_shard(write(tmp_path / "a", BATCH, BATCH, stream=stream))
    before = pa.total_allocated_bytes()
    kept = list(shard.batches({"ids"}))
    buffers = [buffer for batch in kept for buffer in batch.column("ids").buffers() if buffer]
    assert len(buffers) == 4
    assert all(shard.holds(buffer) for buffer in buffers)
    assert pa.total_allocated_bytes() == before


def test_a_legacy_stream_is_read(tmp_path: Path) -> None:
    options = pa.ipc.IpcWriteOptions(use_legacy_format=True)
    path = write(tmp_path / "a", BATCH, BATCH, stream=True, options=options)
    assert path.read_bytes()[:4] != b"\xff\xff\xff\xff"
    assert read(path) == [[1, 2], [], [3]] * 2


def test_columns_that_are_not_asked_for_are_not_decoded(tmp_path: Path) -> None:
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    batch = pa.record_batch({"ids": tokens([[7]]), "big": [b"x" * 2**20]})
    shard = open_shard(write(tmp_path / "a", batch, options=options))
    before = pa.total_allocated_bytes()
    kept = list(shard.batches({"ids"}))
    assert kept[0].num_columns == 1
    assert pa.total_allocated_bytes() - before < 2**16


def test_dictionaries_of_other_columns_and_their_deltas_are_passed_by(tmp_path: Path) -> None:
    path, kind = tmp_path / "a", pa.dictionary(pa.int32(), pa.string())
    schema = pa.schema({"ids": pa.list_(pa.int32()), "word": kind})
    words = [pa.DictionaryArray.from_arrays([0], w) for w in (["a"], ["a", "b"], ["c"])]
    options = pa.ipc.IpcWriteOptions(emit_dictionary_deltas=True)
    with pa.ipc.new_stream(path, schema, options=options) as writer:
        for i, word in enumerate(words):
            writer.write_batch(pa.record_batch([tokens([[i]]), word], schema=schema))
    assert read(path) == [[0], [1], [2]]


def as_parquet(path: Path) -> None:
    pyarrow.parquet.write_table(pa.table(BATCH), path)


def as_feather_1(path: Path) -> None:
    path.write_bytes(b"FEA1" + bytes(100) + b"FEA1")


def as_gzip(path: Path) -> None:
    path.write_bytes(gzip.compress(streamed(BATCH)))


def as_numpy(path: Path) -> None:
    with open(path, "wb") as file:
        np.save(file, np.arange(5))


def as_archive(path: Path) -> None:
    with open(path, "wb") as file:
        np.savez(file, a=np.arange(5))


MISTAKES = {
    "Parquet.*pyarrow.parquet.read_table": as_parquet,
    "Feather file of version 1.*write_feather": as_feather_1,
    "compressed as a whole with gzip.*Decompress it": as_gzip,
    "NumPy": as_numpy,
    "zip archive": as_archive,
    "JSON": lambda path: path.write_text('{"ids": [1]}\n'),
    "text .CSV": lambda path: path.write_text("ids,mask\n1,1\n" * 50),
    "LFS pointer.*git lfs pull": lambda path: path.write_text("version https://git-lfs.github.c"),
    "the file is empty": lambda path: path.write_bytes(b""),
    "begins with b'.x00": lambda path: path.write_bytes(bytes(5000)),
    "no regular file": lambda path: os.mkfifo(path),
    "No such file": lambda path: None,
}


@pytest.mark.parametrize("why", MISTAKES)
def test_what_is_no_arrow_file_is_named(tmp_path: Path, why: str) -> None:
    MISTAKES[why](tmp_path / "given")
    with pytest.raises(DataError, match=f"given: .*{why}"):
        open_shard(tmp_path / "given")


@pytest.mark.parametrize("stream", [False, True])
def test_a_file_cut_anywhere_is_refused_or_warned_of(tmp_path: Path, stream: bool) -> None:
    whole = write(tmp_path / "whole", BATCH, BATCH, stream=stream).read_bytes()
    cut, warned = tmp_path / "cut", 0
    for size in range(len(whole)):
        cut.write_bytes(whole[:size])
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                rows = read(cut)
            except DataError:
                continue
        # Cut just after a message, which the format allows: none, one or both batches are there.
        assert [str(each.message) for each in caught if "end-of-stream" in str(each.message)]
        assert rows in ([], [[1, 2], [], [3]], [[1, 2], [], [3]] * 2)
        warned += 1
    assert (warned > 0) is stream


def test_two_streams_in_one_file_are_refused_rather_than_half_read(tmp_path: Path) -> None:
    path = tmp_path / "two"
    path.write_bytes(streamed(BATCH) * 2)
    with pytest.raises(DataError, match=r"two: .* bytes follow the end .* two in one file"):
        read(path)


def test_a_footer_that_counts_other_batches_is_refused(tmp_path: Path) -> None:
    one = write(tmp_path / "one", BATCH).read_bytes()
    two = write(tmp_path / "two", BATCH, BATCH).read_bytes()
    footer = two[-10 - int.from_bytes(two[-10:-6], "little") :]
    mixed = tmp_path / "mixed"
    mixed.write_bytes(one[: -10 - int.from_bytes(one[-10:-6], "little")] + footer)
    with pytest.raises(DataError, match="1 record batches where its footer says 2"):
        read(mixed)


def test_a_file_that_shrinks_is_found_by_its_size_and_one_replaced_is_read_on(
    tmp_path: Path,
) -> None:
    path = write(tmp_path / "a", BATCH)
    shard = open_shard(path)
    write(tmp_path / "b", BATCH, BATCH).replace(path)
    shard.check_size()
    assert [batch.num_rows for batch in shard.batches({"ids"})] == [3]
    shard = open_shard(path)
    os.truncate(path, mmap.PAGESIZE // 8)
    with pytest.raises(DataError, match=r"cut short while it was read: from .* to 512"):
        shard.check_size()


def test_running_out_of_descriptors_says_what_to_do(tmp_path: Path) -> None:
    path = write(tmp_path / "a", BATCH)
    code = (
        "import resource, sys; from pathlib import Path; from trainer.loader.arrow import *;"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40));"
        "kept = [open_shard(Path(sys.argv[1])) for _ in range(50)]"
    )
    ended = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True)
    assert "Too many open files. Each shard takes a descriptor" in ended.stderr
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 40
