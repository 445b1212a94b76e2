import dataclasses
import hashlib
import io
import json
import zipfile
from contextlib import nullcontext as nothing

import pytest

from protocol.errors import DataError
from trainer.bundle import BASE, MANIFEST, MODEL, Manifest, check, open_bundle, write_bundle

MANIFEST_OF_A_RUN = Manifest(
    run_id="export.0003.7f3a",
    stage="export",
    arm="lp-ft",
    inputs={"pretrain": "pretrain.0001.7f3a", "finetune": "finetune.0002.7f3a"},
    preprocessing={"length": 128},
    config={"export": {"opset": 18}},
    classes=("A/1", "A/2"),
    metrics={"validation_accuracy": 0.9},
    data_hash="d" * 64,
    code_hash="c" * 64,
)


@pytest.fixture
def members(tmp_path):
    files = {MODEL: tmp_path / "in.onnx", BASE: tmp_path / "in.safetensors"}
    files[MODEL].write_bytes(b"graph" * 20)
    files[BASE].write_bytes(b"weights" * 20)
    return files


@pytest.fixture
def ship(tmp_path, members):
    return write_bundle(tmp_path / "a.ship", MANIFEST_OF_A_RUN, members).path


def sealed_zip(path, entries, compression=zipfile.ZIP_STORED):
    """Write an archive with a valid seal, as a malicious maker could."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as archive:
        for name, data in entries:
            archive.writestr(name, data)
        archive.comment = b"0" * 64
    data = buffer.getvalue()[:-64]
    path.write_bytes(data + hashlib.sha256(data).hexdigest().encode())
    return path


def members_of(path):
    with zipfile.ZipFile(path) as archive:
        return [(name, archive.read(name)) for name in archive.namelist()]


def test_a_bundle_comes_back_as_it_was_written(ship, members):
    bundle = open_bundle(ship)
    assert dataclasses.replace(bundle.manifest, members={}) == MANIFEST_OF_A_RUN
    assert bundle.read(MODEL) == members[MODEL].read_bytes()
    assert bundle.read(BASE) == members[BASE].read_bytes()
    assert bundle.sha256 == hashlib.sha256(ship.read_bytes()).hexdigest()
    assert bundle.size == ship.stat().st_size


def test_the_same_content_makes_the_same_bytes(ship, tmp_path, members):
    again = write_bundle(tmp_path / "b.ship", MANIFEST_OF_A_RUN, members)
    assert again.path.read_bytes() == ship.read_bytes()


def test_other_zip_programs_can_read_it(ship):
    with zipfile.ZipFile(ship) as archive:
        assert archive.testzip() is None
        assert json.loads(archive.read(MANIFEST))["run_id"] == "export.0003.7f3a"


def test_checking_tells_what_it_is(ship):
    told = check(ship)
    assert told["run_id"] == "export.0003.7f3a"
    assert told["sha256"] == hashlib.sha256(ship.read_bytes()).hexdigest()
    json.dumps(told)


def test_a_bundle_cut_short_at_any_byte_is_refused(ship):
    data = ship.read_bytes()
    for length in range(len(data)):
        ship.write_bytes(data[:length])
        with pytest.raises(DataError):
            open_bundle(ship)


def test_a_bundle_with_any_byte_altered_is_refused(ship):
    data = ship.read_bytes()
    for at in range(len(data)):
        ship.write_bytes(data[:at] + bytes([data[at] ^ 0x20]) + data[at + 1 :])
        with pytest.raises(DataError):
            open_bundle(ship)


def test_a_bundle_with_bytes_added_is_refused(ship):
    data = ship.read_bytes()
    for altered in (b"x" + data, data + b"x", data + data):
        ship.write_bytes(altered)
        with pytest.raises(DataError):
            open_bundle(ship)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(DataError, match=r"none\.ship"):
        open_bundle(tmp_path / "none.ship")


@pytest.mark.parametrize("name", ["../evil", "/etc/passwd", "extra.txt", MODEL])
def test_a_member_that_does_not_belong_is_refused(ship, name):
    with pytest.warns(UserWarning, match="Duplicate") if name == MODEL else nothing():
        sealed_zip(ship, [*members_of(ship), (name, b"x")])
    with pytest.raises(DataError, match="no ship bundle"):
        open_bundle(ship)


def test_a_missing_member_is_refused(ship):
    sealed_zip(ship, members_of(ship)[:-1])
    with pytest.raises(DataError, match="no ship bundle"):
        open_bundle(ship)


def test_a_compressed_member_is_refused_before_it_is_read(ship):
    bomb = [(MANIFEST, b" " * 10_000_000), (MODEL, b""), (BASE, b"")]
    sealed_zip(ship, bomb, zipfile.ZIP_DEFLATED)
    with pytest.raises(DataError, match="compressed"):
        open_bundle(ship)


def test_a_huge_manifest_is_refused_before_it_is_read(ship):
    sealed_zip(ship, [(MANIFEST, b" " * 4_194_305), (MODEL, b""), (BASE, b"")])
    with pytest.raises(DataError, match="manifest is larger"):
        open_bundle(ship)


def test_a_member_that_the_manifest_does_not_list_so_is_refused(ship):
    entries = dict(members_of(ship))
    sealed_zip(ship, [*{**entries, MODEL: b"another graph"}.items()])
    with pytest.raises(DataError, match=r"model\.onnx is not the file"):
        open_bundle(ship)


@pytest.mark.parametrize(
    ("field", "value", "why"),
    [
        ("version", 2, "version 2"),
        ("run_id", "gate.0003.7f3a", "not one of stage"),
        ("classes", [], "classes"),
        ("classes", ["a", "a"], "classes"),
        ("members", {}, "does not list"),
        ("metrics", {"accuracy": "high"}, "metrics"),
    ],
)
def test_a_manifest_that_is_wrong_is_refused_by_field(ship, field, value, why):
    entries = dict(members_of(ship))
    manifest = {**json.loads(entries[MANIFEST]), field: value}
    sealed_zip(ship, [*{**entries, MANIFEST: json.dumps(manifest)}.items()])
    with pytest.raises(DataError, match=why):
        open_bundle(ship)


def test_a_member_that_changes_after_opening_is_noticed(ship, tmp_path, members):
    bundle = open_bundle(ship)
    members[MODEL].write_bytes(b"another graph")
    write_bundle(ship, MANIFEST_OF_A_RUN, members)
    with pytest.raises(DataError, match="changed"):
        bundle.read(MODEL)


def test_a_missing_member_file_leaves_no_bundle(tmp_path, members):
    members[MODEL].unlink()
    with pytest.raises(DataError, match=r"in\.onnx"):
        write_bundle(tmp_path / "c.ship", MANIFEST_OF_A_RUN, members)
    assert not list(tmp_path.glob("*c.ship*"))
