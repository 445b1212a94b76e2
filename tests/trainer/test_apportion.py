from hypothesis import given
from hypothesis import strategies as st

from trainer.apportion import largest_remainder


@given(
    st.dictionaries(st.text(min_size=1, max_size=3), st.integers(1, 1000), min_size=1, max_size=8),
    st.data(),
)
def test_largest_remainders_add_up_and_stay_within_one(
    counts: dict[str, int], data: st.DataObject
) -> None:
    size = data.draw(st.integers(1, sum(counts.values())))
    quotas = largest_remainder(counts, size)
    assert sum(quotas.values()) == size
    for name, count in counts.items():
        assert abs(quotas[name] - size * count / sum(counts.values())) < 1
        assert quotas[name] <= count
