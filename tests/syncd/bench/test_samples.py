import pytest

from syncd.bench.samples import p50, p95, size_text


def test_percentiles_lie_between_the_samples():
    values = [float(n) for n in range(21)]
    assert p50(values) == 10.0
    assert p95(values) == 19.0
    assert p95(values[::-1]) == 19.0


@pytest.mark.parametrize(
    ("size", "told"),
    [(1 << 30, "1 GiB"), (64 << 20, "64 MiB"), (1024, "1 KiB"), (1500, "1500 bytes")],
)
def test_sizes_are_told_in_their_largest_whole_unit(size, told):
    assert size_text(size) == told
