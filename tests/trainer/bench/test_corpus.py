import numpy as np
import pytest

from protocol.errors import DataError
from trainer.bench.batches import pad
from trainer.bench.corpus import draw_lengths, open_corpus, padded_sums, views
from trainer.loader import open_rows


def test_lengths_are_lognormal_with_their_median_and_within_their_bounds():
    lengths = draw_lengths(100_000, np.random.default_rng(1))
    assert np.median(lengths) == pytest.approx(726, rel=0.02)
    assert np.log(lengths).std() == pytest.approx(0.8, rel=0.02)
    assert lengths.min() >= 16
    assert lengths.max() == 8192


def test_lengths_are_clipped_at_both_ends():
    class Extreme:
        def lognormal(self, mean, sigma, size):
            return np.array([0.2, 15.0, 726.4, 9000.0])

    assert draw_lengths(4, Extreme()).tolist() == [16, 16, 726, 8192]


def test_a_row_begins_with_its_number_and_has_a_mask_as_long(work):
    rows = list(views(work.corpus))
    assert len(rows) == work.corpus.rows
    assert [int(ids[0]) for ids, _ in rows] == list(range(len(rows)))
    assert [len(ids) for ids, _ in rows] == work.corpus.lengths.tolist()
    assert all(len(ids) == len(mask) for ids, mask in rows)
    assert {ids.dtype for ids, _ in rows} == {np.dtype(np.int32)}
    assert {mask.dtype for _, mask in rows} == {np.dtype(np.int8)}


def test_the_loader_sees_the_same_rows_mapped_and_not_decoded(work):
    source = open_rows(work.corpus.shards)
    for row, (ids, mask) in enumerate(views(work.corpus)):
        assert np.array_equal(source.columns["ids"].view(row), ids)
        assert np.array_equal(source.columns["mask"].view(row), mask)
    assert source.decoded == 0


def test_sums_are_those_of_the_rows_whatever_their_padding(work):
    rows = list(views(work.corpus))
    for part in (slice(0, 3), slice(100, 140)):
        batch = pad(rows[part])
        assert np.array_equal(padded_sums(batch.ids, batch.mask), work.corpus.sums[part])


@pytest.mark.parametrize("column", ["ids", "mask"])
def test_a_sum_tells_values_that_changed_or_changed_places(work, column):
    batch = pad(list(views(work.corpus))[:2])
    right = padded_sums(batch.ids, batch.mask)
    values = getattr(batch, column)
    other = int(np.flatnonzero(values[0] != values[0, 1])[-1])
    values[0, [1, other]] = values[0, [other, 1]]
    wrong = padded_sums(batch.ids, batch.mask)
    assert wrong[0] != right[0]
    assert wrong[1] == right[1]


def test_the_same_seed_makes_the_same_corpus_and_another_one_another(tmp_path):
    first, again = (open_corpus(tmp_path / name, rows=20) for name in ("a", "b"))
    other = open_corpus(tmp_path / "a", rows=20, seed=1)
    assert np.array_equal(first.sums, again.sums)
    assert not np.array_equal(first.sums, other.sums)


def test_a_corpus_that_is_there_is_not_written_again(tmp_path):
    before = [path.stat().st_mtime_ns for path in open_corpus(tmp_path, rows=20).shards]
    assert [path.stat().st_mtime_ns for path in open_corpus(tmp_path, rows=20).shards] == before


def test_a_corpus_that_was_left_half_written_is_written_anew(tmp_path):
    partial = tmp_path / "sequences-20-0.partial"
    partial.mkdir()
    (partial / "00000.arrow").write_bytes(b"ARROW1")
    corpus = open_corpus(tmp_path, rows=20)
    assert len(open_rows(corpus.shards)) == 20
    assert not partial.exists()


def test_a_folder_that_cannot_be_made_is_a_users_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"write the benchmark's corpus: .*file"):
        open_corpus(tmp_path / "file", rows=20)
