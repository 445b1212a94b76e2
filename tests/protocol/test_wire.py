import dataclasses
import hashlib
import json
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol import wire
from protocol.dictionary import DICTIONARY
from protocol.errors import DataError, RefusedError
from protocol.messages import StatusReport, encode_messages
from protocol.wire import MAX_PACK_BYTES, Kind, ObjectName, Role, Sealer, Writer, compressed

KEY = bytes(range(32))
SEALER = Sealer(folder="f00d", key=KEY)
UNSEALED = Sealer(folder="unsealed")
WORKER = Writer(3, "51b0c7de", Role.WORKER)
CONTROLLER = Writer(3, "51b0c7de", Role.CONTROLLER)
PAYLOAD = b'[{"type":"ack","writer":"c-000001-7f3a9c02","seq":1}]\n'
WRITERS = st.builds(
    Writer,
    st.integers(0, 999_999),
    st.from_regex("[0-9a-f]{8}", fullmatch=True),
    st.sampled_from(Role),
)


def named(name: ObjectName, body: bytes, **change) -> ObjectName:
    """The name that would make `body` whole."""
    sha256 = hashlib.sha256(body).hexdigest()
    return dataclasses.replace(name, length=len(body), sha256=sha256, **change)


def with_header(change: dict[str, object], *, sealer: Sealer = UNSEALED, payload: bytes = PAYLOAD):
    """An object whose header says something else."""
    name, body = sealer.seal(WORKER, Kind.PACK, 7, PAYLOAD, compress=False)
    header = {**json.loads(body.partition(b"\n")[0]), **change}
    changed = json.dumps(header, separators=(",", ":")).encode() + b"\n" + payload
    return named(name, changed), changed


@pytest.mark.parametrize("sealer", [SEALER, UNSEALED])
@given(
    writer=WRITERS,
    kind=st.sampled_from(Kind),
    seq=st.integers(1, 10**12 - 1),
    payload=st.binary(max_size=200) | st.binary(max_size=5).map(lambda b: b * 500),
    compress=st.booleans(),
)
def test_an_object_is_opened_as_it_was_sealed(sealer, writer, kind, seq, payload, compress):
    name, body = sealer.seal(writer, kind, seq, payload, compress=compress)
    assert ObjectName.parse(str(name)) == name
    assert Writer.parse(str(writer)) == writer
    assert sealer.open(writer, name, body) == payload


@pytest.mark.parametrize("compress", [True, False])
def test_every_change_of_one_byte_is_noticed(compress: bool):
    """Also when the name is changed with it, as only someone at the remote could."""
    name, body = SEALER.seal(WORKER, Kind.PACK, 7, PAYLOAD * 2, compress=compress)
    for at in range(len(body)):
        for flip in (0x01, 0x20, 0x80, body[at] ^ ord(" "), body[at] ^ ord("\n")):
            changed = bytearray(body)
            changed[at] ^= flip
            if changed == body:
                continue
            with pytest.raises(DataError):
                SEALER.open(WORKER, name, bytes(changed))
            with pytest.raises(RefusedError):
                SEALER.open(WORKER, named(name, bytes(changed)), bytes(changed))


def test_an_object_that_is_cut_short_or_longer_is_not_whole_and_may_become_so():
    name, body = SEALER.seal(WORKER, Kind.PACK, 7, PAYLOAD)
    for torn in [body[:at] for at in range(len(body))] + [body + b"\n", bytes(len(body))]:
        with pytest.raises(DataError, match="not whole"):
            SEALER.open(WORKER, name, torn)
    assert SEALER.open(WORKER, name, body) == PAYLOAD


def test_an_object_that_was_cut_short_and_renamed_is_refused():
    name, body = SEALER.seal(WORKER, Kind.PACK, 7, PAYLOAD)
    for torn in [body[:at] for at in range(len(body))] + [body + b"\n"]:
        with pytest.raises(RefusedError):
            SEALER.open(WORKER, named(name, torn), torn)


@pytest.mark.parametrize(
    ("sealer", "writer", "change"),
    [
        (Sealer(folder="f00d", key=KEY[::-1]), WORKER, {}),
        (Sealer(folder="beef", key=KEY), WORKER, {}),
        (UNSEALED, WORKER, {}),
        (SEALER, CONTROLLER, {}),
        (SEALER, Writer(4, WORKER.nonce, WORKER.role), {}),
        (SEALER, Writer(WORKER.epoch, "00000000", WORKER.role), {}),
        (SEALER, WORKER, {"seq": 8}),
        (SEALER, WORKER, {"kind": Kind.STATE}),
    ],
)
def test_an_object_counts_only_where_it_was_meant_to_be(sealer: Sealer, writer: Writer, change):
    name, body = SEALER.seal(WORKER, Kind.PACK, 7, PAYLOAD)
    with pytest.raises(RefusedError):
        sealer.open(writer, dataclasses.replace(name, **change), body)


def test_what_one_end_sealed_cannot_be_reflected_as_the_other_ends():
    """The key is derived by direction: a header that names the other end does not help."""
    name, body = SEALER.seal(WORKER, Kind.PACK, 7, PAYLOAD)
    reflected = body.replace(str(WORKER).encode(), str(CONTROLLER).encode())
    with pytest.raises(RefusedError, match="seal does not fit"):
        SEALER.open(CONTROLLER, named(name, reflected), reflected)


@pytest.mark.parametrize("folder", ["unsealed", "f00d"])
def test_an_unsealed_object_is_refused_where_there_is_a_key(folder: str):
    name, body = Sealer(folder=folder).seal(WORKER, Kind.PACK, 7, PAYLOAD)
    with pytest.raises(RefusedError):
        SEALER.open(WORKER, name, body)
    if folder == "f00d":
        with pytest.raises(RefusedError, match="not sealed"):
            SEALER.open(WORKER, name, body)


def test_a_chunk_has_no_seal_and_one_of_any_key_says_nothing():
    """A sealed message names it, and its hash."""
    name, body = SEALER.seal(WORKER, Kind.CHUNK, 3, b"bytes", compress=False)
    assert body == SEALER.chunk_header(WORKER, 3) + b"bytes"
    assert SEALER.open(WORKER, name, body) == b"bytes"
    sealed = body.replace(b'"mac":""', b'"mac":"' + b"0" * 64 + b'"')
    assert SEALER.open(WORKER, named(name, sealed), sealed) == b"bytes"
    for wrong in (b"0" * 63, b"Z" * 64):
        other = body.replace(b'"mac":""', b'"mac":"' + wrong + b'"')
        with pytest.raises(RefusedError, match="not written as it must be"):
            SEALER.open(WORKER, named(name, other), other)


def test_a_chunk_is_never_taken_for_a_pack_that_nobody_has_sealed():
    name, body = SEALER.seal(WORKER, Kind.CHUNK, 3, b"[]\n", compress=False)
    pack = body.replace(b'"chunk"', b'"pack"')
    renamed = named(ObjectName(3, Kind.PACK, name.length, name.sha256), pack)
    with pytest.raises(RefusedError, match="not sealed"):
        SEALER.open(WORKER, renamed, pack)


@pytest.mark.parametrize("mac", ["", "é", "\ud800", None, 1, [], {}, "0" * 64, "0" * 63])
def test_whatever_stands_for_a_seal_is_refused(mac: object):
    name, body = with_header({"mac": mac}, sealer=SEALER)
    with pytest.raises(RefusedError):
        SEALER.open(WORKER, name, body)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"v": 2}, "protocol version 2; this program speaks 1"),
        ({"v": "1"}, "protocol version"),
        ({"v": True}, "header"),
        ({"v": 1.0}, "header"),
        ({"seq": 7.0}, "header"),
        ({"folder": "other"}, "another folder"),
        ({"codec": "lzma"}, "unknown codec"),
        ({"codec": []}, "unknown codec"),
        ({"codec": "zlib"}, "inflated"),
        ({"more": 1}, "header"),
        ({"mac": "00"}, "header"),
        ({"more": "x" * 2000}, "broken header"),
        ({"more": float("nan")}, "broken header"),
    ],
)
def test_a_header_that_is_not_exactly_ours_is_refused(change: dict[str, object], why: str):
    name, body = with_header(change)
    with pytest.raises(RefusedError, match=why):
        UNSEALED.open(WORKER, name, body)


@given(st.binary(max_size=60) | st.sampled_from([b"[]\n", b"[" * 1000, b"{}", b'{"v":1}\n']))
def test_any_bytes_are_refused(body: bytes):
    name = named(ObjectName(7, Kind.PACK, 1, "0" * 64), body)
    for sealer in (SEALER, UNSEALED):
        with pytest.raises(RefusedError):
            sealer.open(WORKER, name, body)


def test_a_payload_that_inflates_to_more_than_its_kind_may_hold_is_refused():
    bomb = zlib.compress(bytes(MAX_PACK_BYTES + 1), 1)
    assert len(bomb) < 1024 * 1024
    with pytest.raises(RefusedError, match=f"more than {MAX_PACK_BYTES} bytes"):
        UNSEALED.open(WORKER, *with_header({"codec": "zlib"}, payload=bomb))


def test_a_payload_of_the_greatest_size_is_opened_and_a_larger_one_is_not_sealed():
    payload = bytes(MAX_PACK_BYTES)
    assert UNSEALED.open(WORKER, *UNSEALED.seal(WORKER, Kind.PACK, 7, payload)) == payload
    with pytest.raises(DataError, match="more than it may hold"):
        UNSEALED.seal(WORKER, Kind.PACK, 7, payload + b"\0")
    with pytest.raises(DataError, match="more than it may hold"):
        UNSEALED.seal(WORKER, Kind.PACK, 7, payload, compress=False)


@pytest.mark.parametrize("change", [lambda packed: packed[:-1], lambda packed: packed + b"\0"])
def test_a_compressed_payload_has_its_own_end_and_nothing_after(change):
    deflater = zlib.compressobj(zdict=DICTIONARY)
    with_words = deflater.compress(PAYLOAD) + deflater.flush()
    for codec, packed in {"zlib": zlib.compress(PAYLOAD), "zlib-dict": with_words}.items():
        with pytest.raises(RefusedError, match="cannot be inflated"):
            UNSEALED.open(WORKER, *with_header({"codec": codec}, payload=change(packed)))


def test_what_was_compressed_without_the_dictionary_is_read():
    body = with_header({"codec": "zlib"}, payload=zlib.compress(PAYLOAD))
    assert UNSEALED.open(WORKER, *body) == PAYLOAD


def test_a_payload_of_another_dictionary_is_refused():
    deflater = zlib.compressobj(zdict=DICTIONARY[1:])
    packed = deflater.compress(PAYLOAD) + deflater.flush()
    for codec in ("zlib", "zlib-dict"):
        with pytest.raises(RefusedError, match="cannot be inflated"):
            UNSEALED.open(WORKER, *with_header({"codec": codec}, payload=packed))


def test_the_words_of_messages_cost_a_pack_next_to_nothing():
    status = {"running": [], "waiting": [], "ended": [], "problems": [], "leaving": ""}
    payload = encode_messages([StatusReport(status=status)])
    codec, packed = compressed(payload)
    assert codec == "zlib-dict"
    assert len(packed) < len(zlib.compress(payload)) / 2


GOOD = f"000000000012-pack-34-{'0' * 64}"


@pytest.mark.parametrize(
    "text",
    [
        "",
        GOOD[1:],
        GOOD + "\n",
        GOOD + ".partial",
        GOOD.replace("pack", "park"),
        GOOD.replace("-34-", "--"),
        GOOD.replace("-34-", "-034-"),
        GOOD.replace("-34-", "-٣٤-"),
        GOOD.replace("-34-", f"-{MAX_PACK_BYTES + 1}-"),
        GOOD.replace("0" * 64, "A" * 64),
        "queue.txt",
    ],
)
def test_a_file_of_another_name_is_no_object(text: str):
    assert ObjectName.parse(GOOD) is not None
    assert ObjectName.parse(text) is None


@pytest.mark.parametrize(
    "text",
    ["", "c-1-00000000", "x-000001-00000000", "c-000001-0000000g", "w-000001-00000000/", "in"],
)
def test_a_folder_of_another_name_is_no_writer(text: str):
    assert Writer.parse(text) is None


@given(st.text(max_size=30) | st.from_regex(wire._NAME) | st.from_regex(wire._WRITER))
def test_a_name_that_is_parsed_is_written_the_same(text: str):
    for parse in (Writer.parse, ObjectName.parse):
        found = parse(text)
        assert found is None or str(found) == text


def test_the_newest_writer_has_the_highest_epoch_then_the_highest_nonce():
    writers = [Writer(2, "00000000", Role.WORKER), Writer(1, "ffffffff", Role.WORKER)]
    assert max(writers) == writers[0]
    assert max([*writers, WORKER]) == WORKER
    assert WORKER.role.peer is Role.CONTROLLER
    assert CONTROLLER.role.peer is Role.WORKER


def test_the_key_is_not_in_the_repr_of_a_sealer():
    assert "secret" not in repr(Sealer(folder="f", key=b"secret" * 6))
