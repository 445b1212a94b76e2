import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from protocol.schema import MAX_DEPTH, decode, dumps, load_toml, loads

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=12,
)


class Colour(StrEnum):
    RED = "red"


@dataclass(frozen=True, kw_only=True)
class Inner:
    count: int

    def __post_init__(self) -> None:
        if self.count < 0:
            raise ValueError("count is below 0")


@dataclass(frozen=True, kw_only=True)
class Outer:
    name: str
    share: float = 1.0
    flag: bool = False
    colour: Colour = Colour.RED
    perhaps: int | None = None
    inner: Inner | None = None
    inners: tuple[Inner, ...] = ()
    table: Mapping[str, float] = field(default_factory=dict)
    anything: Any = None


def test_every_kind_of_field_is_decoded():
    value = {
        "name": "a",
        "share": 1,
        "flag": True,
        "colour": "red",
        "perhaps": 3,
        "inner": {"count": 1},
        "inners": [{"count": 2}],
        "table": {"x": 0.5, "y": 2},
        "anything": [1, {"z": None}],
    }
    assert decode(Outer, value) == Outer(
        name="a",
        share=1.0,
        flag=True,
        perhaps=3,
        inner=Inner(count=1),
        inners=(Inner(count=2),),
        table={"x": 0.5, "y": 2.0},
        anything=[1, {"z": None}],
    )


def test_unknown_keys_are_passed_over_and_missing_ones_take_their_defaults():
    assert decode(Outer, {"name": "a", "from the future": 1}) == Outer(name="a")


@pytest.mark.parametrize(
    ("value", "named"),
    [
        ([], "Outer"),
        ({}, "name"),
        ({"name": 1}, "Outer.name"),
        ({"name": None}, "Outer.name"),
        ({"name": "a", "share": True}, "Outer.share"),
        ({"name": "a", "share": "1"}, "Outer.share"),
        ({"name": "a", "share": float("nan")}, "Outer.share"),
        ({"name": "a", "share": 10**400}, "Outer.share"),
        ({"name": "a", "flag": 1}, "Outer.flag"),
        ({"name": "a", "colour": "blue"}, "blue"),
        ({"name": "a", "colour": []}, "Colour"),
        ({"name": "a", "perhaps": 1.0}, "Outer.perhaps"),
        ({"name": "a", "perhaps": 2**63}, "Outer.perhaps"),
        ({"name": "a", "inner": {"count": True}}, "Inner.count"),
        ({"name": "a", "inner": {"count": -1}}, "count is below 0"),
        ({"name": "a", "inners": {}}, "Outer.inners"),
        ({"name": "a", "table": {"x": None}}, "Outer.table.x"),
        ({"name": "a", "table": []}, "Outer.table"),
    ],
)
def test_a_value_of_another_type_is_refused_by_the_name_of_its_field(value: Any, named: str):
    with pytest.raises(ValueError, match=named):
        decode(Outer, value)


@given(st.dictionaries(st.sampled_from(list(Outer.__dataclass_fields__)), JSON) | JSON)
def test_any_json_is_decoded_or_refused_with_a_value_error(value: Any):
    try:
        assert isinstance(decode(Outer, value), Outer)
    except ValueError:
        return


@given(st.binary() | JSON.map(lambda v: json.dumps(v).encode()))
@example(b"[" * 100_000)
@example(b'"\\ud800"')
@example(b'"\xed\xa0\x80"')
@example(b"1e999")
@example(b"1" * 5000)
def test_what_is_parsed_can_be_written_again_strictly(data: bytes):
    try:
        value = loads(data)
    except ValueError:
        return
    text = json.dumps(value, allow_nan=False, ensure_ascii=False)
    assert loads(text.encode("utf-8")) == value


def test_a_byte_order_mark_is_passed_over():
    assert loads(b'\xef\xbb\xbf{"a": 1}') == {"a": 1}


def test_nesting_has_a_limit():
    assert loads(b"[" * MAX_DEPTH + b"]" * MAX_DEPTH)
    with pytest.raises(ValueError, match="deep"):
        loads(b"[" * (MAX_DEPTH + 1) + b"]" * (MAX_DEPTH + 1))


def test_what_is_written_is_read_back_and_text_that_is_not_unicode_is_mended():
    value = {"a": ["\U0001f600", "é\n", 1.5, None], "\\ud800": "\\udc80"}
    assert loads(dumps(value)) == value
    assert loads(dumps({"a\ud800": "caf\udce9 \U0001f600"})) == {"a?": "caf? \U0001f600"}


@given(
    st.recursive(st.text() | st.integers(), lambda v: st.lists(v) | st.dictionaries(st.text(), v))
)
@example("\ud83d")
def test_whatever_text_is_written_can_be_read(value: Any):
    assert loads(dumps(value)) == loads(dumps(loads(dumps(value))))


@pytest.mark.parametrize(
    ("text", "line"),
    [("a = 1\nb = ", 2), ("a =", 1), ('a = """\n\nx', 3), ("a = 1\n\nb\n", 3), ("[a]\n= 1\n", 2)],
)
def test_what_is_no_toml_is_told_with_its_line(text: str, line: int) -> None:
    with pytest.raises(ValueError, match=rf"line {line}\b"):
        load_toml(text)
    assert load_toml("a = 1") == {"a": 1}
