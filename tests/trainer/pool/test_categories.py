import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.pool.categories import Categories, Texts

chunks = st.lists(st.lists(st.sampled_from("abcdef"), max_size=8), min_size=1, max_size=5)


def arrays(values: list[list[str]], *, dictionary: bool) -> list[pa.Array]:
    made = [pa.array(each, pa.string()) for each in values]
    return [array.dictionary_encode() for array in made] if dictionary else made


@pytest.mark.parametrize("dictionary", [False, True])
@given(values=chunks)
def test_a_column_is_what_its_chunks_are(values: list[list[str]], dictionary: bool):
    flat = [value for chunk in values for value in chunk]
    column = Categories.of(arrays(values, dictionary=dictionary))
    assert len(column) == len(flat)
    assert column[:].tolist() == flat
    assert list(column.names) == sorted(set(flat))
    for name in "abz":
        assert column.is_(name).tolist() == [value == name for value in flat]


def test_rows_are_chosen_as_from_an_array():
    column = Categories.of([pa.array(["b", "a", "b"])])
    texts = Texts([pa.array(["x"]), pa.array([], pa.string()), pa.array(["y", "z"])])
    assert column[0] == "b"
    assert column[np.array([2, 1])].tolist() == ["b", "a"]
    assert column[np.array([True, False, True])].tolist() == ["b", "b"]
    assert len(texts) == 3
    assert texts[1] == "y"
    assert texts[np.array([2, 0, 2])].tolist() == ["z", "x", "z"]
    assert texts[1:].tolist() == ["y", "z"]
    assert list(texts.chunks()) == [["x"], [], ["y", "z"]]
    with pytest.raises(IndexError):
        texts[3]


@given(st.lists(st.tuples(st.sampled_from("ab c"), st.sampled_from(["1", "/", "x"])), max_size=20))
def test_joined_columns_are_those_of_the_joined_values(pairs: list[tuple[str, str]]):
    first = Categories.of([pa.array([a for a, _ in pairs], pa.string())])
    second = Categories.of([pa.array([b for _, b in pairs], pa.string())])
    joined = first.joined(second, "/")
    assert joined[:].tolist() == [f"{a}/{b}" for a, b in pairs]
    assert list(joined.names) == sorted({f"{a}/{b}" for a, b in pairs})


def test_a_code_takes_no_more_bytes_than_it_must():
    assert Categories.of([pa.array(list("abc"))]).codes.dtype == np.uint8
    many = Categories.of([pa.array([str(number) for number in range(300)])])
    assert many.codes.dtype == np.uint16
