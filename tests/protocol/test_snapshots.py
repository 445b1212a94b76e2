import dataclasses
import hashlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import RefusedError
from protocol.messages import FileEntry, Snapshot
from protocol.snapshots import decode_snapshot, each_file, encode_snapshot

ENTRIES = st.builds(
    FileEntry,
    path=st.sampled_from(["stages.toml", "a/b.py", "a/c.py", "é", "z"]),
    size=st.integers(0, 2**40),
    mode=st.sampled_from([0o644, 0o755]),
    sha256=st.binary(min_size=32, max_size=32).map(bytes.hex),
)
FILES = st.lists(ENTRIES, unique_by=lambda entry: entry.path)


def entry(path: str) -> dict[str, object]:
    return {"path": path, "size": 0, "mode": 0o644, "sha256": "0" * 64}


def snapshot(value: object) -> Snapshot:
    blob = value if isinstance(value, bytes) else json.dumps(value).encode()
    return Snapshot(order=1, id=hashlib.sha256(blob).hexdigest()[:16], blob=blob)


@given(FILES, st.randoms(use_true_random=False))
def test_the_same_files_in_any_order_have_the_same_id(files: list[FileEntry], random):
    shuffled = random.sample(files, len(files))
    one, other = encode_snapshot(1, files), encode_snapshot(2, shuffled)
    assert one.id == other.id
    assert decode_snapshot(one) == sorted(files, key=lambda file: file.path)
    assert list(each_file(one)) == decode_snapshot(one)


@given(FILES, st.data())
def test_a_list_of_ones_own_that_ends_early_is_a_value_error(
    files: list[FileEntry], data: st.DataObject
):
    whole = encode_snapshot(1, files)
    cut = whole.blob[: data.draw(st.integers(0, len(whole.blob) - 1))]
    with pytest.raises(ValueError, match=r".+"):
        list(each_file(dataclasses.replace(whole, blob=cut)))


@given(FILES.filter(bool), st.data())
def test_a_snapshot_of_which_a_byte_was_changed_is_refused(
    files: list[FileEntry], data: st.DataObject
):
    whole = encode_snapshot(1, files)
    at = data.draw(st.integers(0, len(whole.blob) - 1))
    blob = bytearray(whole.blob)
    blob[at] ^= data.draw(st.integers(1, 255))
    with pytest.raises(RefusedError, match="not the one of its id"):
        decode_snapshot(dataclasses.replace(whole, blob=bytes(blob)))


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ({}, "not a list"),
        ([1], "FileEntry"),
        ([{"path": "a"}], "missing"),
        ([{**entry("a"), "sha256": "../../etc/passwd"}], "sha256"),
        ([{**entry("a"), "size": -1}], "size"),
        ([{**entry("a"), "mode": 0o10000}], "mode"),
        ([entry("/etc/passwd")], "absolute"),
        ([entry("a/../../b")], "absolute"),
        ([entry("a"), entry("a")], "twice"),
        ([entry("a"), entry("a/b/c")], "'a' is a file and a folder"),
        (b"[" * 100_000, "deep"),
        (b"\xff", "decode"),
    ],
)
def test_a_list_that_could_not_be_unpacked_safely_is_refused(value: object, why: str):
    with pytest.raises(RefusedError, match=why):
        decode_snapshot(snapshot(value))


@given(st.binary(max_size=80))
def test_any_bytes_are_refused(blob: bytes):
    with pytest.raises(RefusedError):
        decode_snapshot(snapshot(b"x" + blob))


def test_no_files_are_a_snapshot_too():
    assert decode_snapshot(encode_snapshot(1, [])) == []
