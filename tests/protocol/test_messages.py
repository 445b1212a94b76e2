import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from protocol.journal import JournalRecord
from protocol.messages import (
    Ack,
    Append,
    CheckpointsGrouped,
    Content,
    DropFile,
    Hello,
    Journal,
    Message,
    Piece,
    PutFile,
    QueuedCommand,
    RunEnded,
    Snapshot,
    StatusReport,
    decode_messages,
    encode_messages,
    said_again,
)
from protocol.results import RunRecord
from protocol.states import Result, State

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
COUNT = st.integers(0, 2**62)
HASH = st.binary(min_size=32, max_size=32).map(bytes.hex)
MODE = st.integers(0, 0o7777)
BLOB = st.binary(max_size=20)
PIECES = st.lists(st.builds(Piece, object=TEXT, offset=COUNT, length=COUNT), max_size=2).map(tuple)
RECORD = JournalRecord(number=1, line="run:a", state=State.CLAIMED, time=1.5, worker="w")
RUN = RunRecord(run_id="a.0001.7f3a", stage="a", line="run:a", result=Result.LOST)

MESSAGES: st.SearchStrategy[Message] = st.one_of(
    st.builds(
        Hello,
        host=TEXT,
        version=TEXT,
        time=st.floats(0, 1e10),
        inherits=st.dictionaries(TEXT, COUNT),
    ),
    st.builds(QueuedCommand, number=st.integers(1, 99), line=TEXT, snapshot=COUNT, error=TEXT),
    st.builds(Content, sha256=HASH, size=COUNT, pieces=PIECES, blob=BLOB),
    st.builds(Snapshot, order=st.integers(1, 99), id=TEXT, blob=BLOB),
    st.builds(PutFile, path=TEXT, size=COUNT, mode=MODE, sha256=HASH),
    st.builds(
        PutFile,
        path=TEXT,
        size=COUNT,
        mode=MODE,
        sha256=HASH,
        first=st.just(5),
        until=st.sampled_from([0, 5, 99]),
    ),
    st.builds(CheckpointsGrouped, run_id=TEXT, number=st.integers(1, 99), files=st.integers(1, 99)),
    st.builds(DropFile, path=TEXT),
    st.builds(
        Append,
        path=TEXT,
        stream=TEXT,
        start=st.just(5),
        end=st.integers(25, 99),
        blob=BLOB,
        pieces=PIECES,
    ),
    st.just(Journal(record=RECORD)),
    st.just(RunEnded(record=RUN)),
    st.builds(StatusReport, status=st.dictionaries(TEXT, TEXT | COUNT | st.none())),
    st.builds(Ack, writer=TEXT, seq=COUNT),
)


@given(st.lists(MESSAGES, max_size=8))
def test_messages_are_read_back_as_they_were_written(messages: list[Message]):
    assert decode_messages(encode_messages(messages)) == messages


@given(st.lists(MESSAGES, max_size=8))
def test_what_is_said_again_is_other_bytes_each_time(messages: list[Message]):
    payloads = [encode_messages(messages)]
    payloads += [said_again(payloads[0]), said_again(said_again(payloads[0]))]
    assert len(set(payloads)) == 3
    assert all(decode_messages(payload) == messages for payload in payloads)


def test_blobs_follow_the_list_in_its_order():
    first = Append(path="in/a.log", stream="s", start=0, end=2, blob=b"12")
    second = Append(path="in/b.log", stream="s", start=0, end=3, blob=b"\n\n3")
    head, _, blobs = encode_messages([first, DropFile(path="x"), second]).partition(b"\n")
    assert [value.get("blob") for value in json.loads(head)] == [2, None, 3]
    assert blobs == b"12\n\n3"


def test_a_type_of_a_newer_writer_is_passed_over_with_its_blob():
    ack = Ack(writer="w", seq=1)
    head = [{"type": "hologram", "blob": 3}, {"type": "ack", "writer": "w", "seq": 1, "mood": 1}]
    assert decode_messages(json.dumps(head).encode() + b"\nabc") == [ack]


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"[]",
        b"{}\n",
        b"[1]\n",
        b"[" * 100_000 + b"\n",
        b'[{"type":"ack","writer":"w","seq":1,"blob":4}]\nabc',
        b'[{"type":"ack","writer":"w","seq":1,"blob":2}]\nabc',
        b'[{"type":"ack","writer":"w","seq":1,"blob":-1}]\n',
        b'[{"type":"ack","writer":"w","seq":1,"blob":true}]\n',
        b'[{"type":"ack","writer":"w"}]\n',
        b'[{"type":"ack","writer":"w","seq":1e2}]\n',
        b'[{"type":"ack","writer":"\\ud800","seq":1}]\n',
        b'[{"type":"status","status":{"a":NaN}}]\n',
        b'[{"type":"command","number":0,"line":"run:a"}]\n',
        b'[{"type":"snapshot","order":0,"id":""}]\n',
        b'[{"type":"append","path":"a","stream":"s","start":2,"end":1}]\n',
        b'[{"type":"append","path":"a","stream":"s","start":0,"end":1,"blob":2}]\nab',
        b'[{"type":"content","sha256":"../x","size":0}]\n',
        b'[{"type":"put","path":"a","size":-1,"mode":0,"sha256":""}]\n',
        b'[{"type":"content","sha256":"%s","size":0,"pieces":[{"object":"","offset":-1,"length":0}]}]\n'
        % (b"0" * 64),
        b'[{"type":"run","record":{"run_id":"x","stage":"y","line":"","result":"great"}}]\n',
    ],
)
def test_a_malformed_payload_is_a_value_error(payload: bytes):
    with pytest.raises(ValueError, match=r"."):
        decode_messages(payload)


FIELDS = st.sampled_from(
    ["number", "line", "sha256", "size", "pieces", "path", "start", "end", "record", "seq", "blob"]
)
VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(FIELDS, inner, max_size=2),
    max_leaves=5,
)
TYPES = st.sampled_from([t.type for t in Message.__args__])


@given(
    st.lists(st.tuples(TYPES, st.dictionaries(FIELDS, VALUES, max_size=5))).map(
        lambda found: [{**fields, "type": kind} for kind, fields in found]
    ),
    BLOB,
)
@example([{"type": "ack", "seq": 10**400, "writer": "w"}], b"")
def test_any_json_is_messages_or_a_value_error(head: list[dict[str, Any]], blob: bytes):
    try:
        messages = decode_messages(json.dumps(head).encode() + b"\n" + blob)
    except ValueError:
        return
    assert decode_messages(encode_messages(messages)) == messages


@given(st.binary(max_size=100) | st.binary(max_size=30).map(b"[{}]\n".__add__))
def test_any_bytes_are_messages_or_a_value_error(payload: bytes):
    try:
        decode_messages(payload)
    except ValueError:
        return


def test_a_file_name_in_another_encoding_does_not_spoil_a_pack():
    (status,) = decode_messages(encode_messages([StatusReport(status={"problems": ["caf\udce9"]})]))
    assert status == StatusReport(status={"problems": ["caf?"]})
