"""Each parser with any bytes, with valid ones that were changed, and with those made to hurt."""

from __future__ import annotations

import json
import resource
import time
import zlib
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from parsers import TARGETS, Target

SETTINGS = settings(
    derandomize=True,
    database=None,
    deadline=None,
    max_examples=100,
    suppress_health_check=list(HealthCheck),
)
BITS = [
    b"\0", b"\n", b"\r", b'"', b"{", b"}", b"[", b"]", b",", b"\xff", b"\\ud800", b"\\u0000",
    b"NaN", b"-1", b"1e400", b"9" * 30, b"null", b"true", b"../", b"\xe2\x80\xae", b"\x1b[31m",
    b"=", b"[stages.", b"'''",
]  # fmt: skip


@pytest.mark.parametrize("name", TARGETS)
@given(data=st.binary(max_size=300))
@SETTINGS
def test_any_bytes_are_read_or_refused_with_an_error_that_is_meant(name: str, data: bytes) -> None:
    TARGETS[name].run(data)


@st.composite
def changed(draw: st.DrawFn, target: Target) -> bytes:
    """Valid bytes with a few pieces replaced."""
    data = draw(st.sampled_from(list(target.seeds())))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(data)))
        end = min(len(data), at + draw(st.sampled_from([0, 1, 1, 2, 8, 64])))
        data = data[:at] + draw(st.sampled_from(BITS) | st.binary(max_size=4)) + data[end:]
    return data


@pytest.mark.parametrize("name", TARGETS)
@given(data=st.data())
@SETTINGS
def test_changed_bytes_are_read_or_refused_with_an_error_that_is_meant(
    name: str, data: st.DataObject
) -> None:
    TARGETS[name].run(data.draw(changed(TARGETS[name])))


@pytest.mark.parametrize("name", TARGETS)
def test_the_seeds_are_read(name: str) -> None:
    """Or the tests above would look at nothing but refusals."""
    seeds = list(TARGETS[name].seeds())
    assert seeds
    for seed in seeds:
        TARGETS[name].run(seed)


def bombs() -> Iterator[tuple[str, bytes]]:
    """Small or plain bytes that cost a careless reader time, memory or its stack."""
    yield "nested lists", b"[" * 500_000
    yield "nested lists, closed", b"[" * 100_000 + b"]" * 100_000
    yield "nested objects", b'{"a":' * 200_000
    yield "nested tables", b"[stages." + b"a." * 2_000 + b"a]\n"
    yield "nested arrays in TOML", b"a = " + b"[" * 50_000
    yield "a huge integer", b"9" * 300_000
    yield "a huge integer in a list", b"[" + b"9" * 300_000 + b"]\n"
    yield "a huge exponent", b'{"step":1e999999999}'
    yield "lone surrogates", b'["' + b"\\ud800" * 50_000 + b'"]\n'
    yield "many lines", b"run:a\n" * 200_000
    yield "many unequal lines", b"".join(b"run:%d\n" % n for n in range(100_000))
    yield "one long line", b"x" * 2_000_000
    yield "carriage returns", b"\r" * 2_000_000
    yield "blanks", b" " * 2_000_000
    yield "dashes", b"-" * 1_000_000
    yield "parentheses", b"[syncd] end a attempt 1 at x after 1.0 s: success " + b"(" * 500_000
    yield "digits", b"[syncd] end a attempt " + b"1" * 500_000
    yield "dots", b"a." * 500_000
    yield "dots that stages.toml may have", b"a." * 60_000
    yield "many empty messages", b"[" + b"{}," * 300_000 + b"{}]\n"
    yield "many equal keys", b"{" + b'"a":1,' * 300_000 + b'"a":1}'
    header = {"v": 1, "folder": "unsealed", "writer": "w-000001-51b0c7de", "kind": "pack"}
    text = json.dumps({**header, "seq": 1, "codec": "zlib", "mac": ""}, separators=(",", ":"))
    yield "a zip bomb", text.encode() + b"\n" + zlib.compress(bytes(200 * 1024 * 1024), 1)


BOMBS = dict(bombs())


@pytest.mark.parametrize("bomb", BOMBS)
def test_what_is_made_to_hurt_costs_bounded_time_and_memory(bomb: str) -> None:
    """Bounds that only what grows faster than the input, or with what it claims, passes."""
    for target in TARGETS.values():
        began = time.process_time()
        target.run(BOMBS[bomb])
        assert time.process_time() - began < 30
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert peak < 1024 * 1024  # KiB
