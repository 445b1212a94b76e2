from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncd.bench.http_requests import RequestCounter

GET = b"GET /a HTTP/1.1\r\nHost: x\r\n\r\n"
PUT = b"PUT /b HTTP/1.1\r\nContent-Length: %d\r\n\r\n%sxy" % (len(GET) + 2, GET)
POST = (
    b"POST /c HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"%x;ext=1\r\n%s\r\n3\r\nabc\r\n0\r\nTrailer: t\r\n\r\n" % (len(GET), GET)
)


def count(stream: bytes, *cuts: int) -> int:
    counter = RequestCounter()
    for start, end in zip((0, *cuts), (*cuts, len(stream)), strict=True):
        counter.feed(stream[start:end])
    return counter.requests


@pytest.mark.parametrize("message", [GET, PUT, POST], ids=["without", "by length", "in chunks"])
def test_a_request_counts_once_whatever_its_body_says(message: bytes) -> None:
    assert count(message) == 1
    assert count(message * 3) == 3


@given(st.sets(st.integers(1, len(GET + PUT + POST + GET) - 1)))
def test_segments_do_not_matter(cuts: set[int]) -> None:
    assert count(GET + PUT + POST + GET, *sorted(cuts)) == 4


@pytest.mark.parametrize(
    "stream",
    [b"SSH-2.0-Go\r\n" + b"\r\n\r\n" * 9 + GET, b"\x16\x03\x01" + b"\0" * 200_000 + GET],
    ids=["ssh", "tls"],
)
def test_what_is_no_http_counts_nothing(stream: bytes) -> None:
    assert count(stream, 5) == 0


def test_a_head_that_is_not_whole_is_no_request_yet() -> None:
    assert count(GET[:-1]) == 0
