import numpy as np
import pytest

from protocol.errors import DataError
from trainer.bootstrap import Interval
from trainer.judge import Comparison, Contestant, HeldOut, Verdict, compare, hits, judge, majority


def contestant(classes, chosen, name="candidate"):
    logits = np.eye(len(classes), dtype=np.float32)[[classes.index(c) for c in chosen]]
    return Contestant(name=name, classes=tuple(classes), logits=logits)


def held_out(*truth):
    return HeldOut(truth=np.array(truth), corpus=np.array([c.split("/")[0] for c in truth]))


def compared(mean, low, high):
    interval = Interval(mean=mean, low=low, high=high, confidence=0.95, resamples=1000, count=100)
    return Comparison(
        accuracy=0.5 + mean,
        opponent_accuracy=0.5,
        difference=interval,
        corpora={},
        classes=("A/1",),
        clips=100,
    )


def verdict(mean, low, high, margin=0.0):
    return judge(compared(mean, low, high), candidate="c", opponent="o", margin=margin)[0]


def test_classes_are_matched_by_name_whatever_their_order():
    clips = held_out("A/1", "A/2", "B/1", "B/1")
    ours = contestant(["A/1", "A/2", "B/1"], ["A/1", "A/2", "B/1", "A/1"])
    theirs = contestant(["B/1", "A/2", "A/1"], ["A/1", "A/2", "B/1", "A/1"])
    comparison = compare(ours, theirs, clips, seed=0, resamples=1000)
    assert comparison.accuracy == comparison.opponent_accuracy == 0.75
    assert comparison.difference.mean == comparison.difference.high == 0.0


def test_the_difference_is_told_by_corpus_in_points():
    clips = held_out("A/1", "A/2", "B/1", "B/2")
    every = ["A/1", "A/2", "B/1", "B/2"]
    ours = contestant(every, ["A/1", "A/2", "B/1", "B/1"])
    theirs = contestant(every, ["A/1", "A/1", "B/2", "B/2"])
    comparison = compare(ours, theirs, clips, seed=0, resamples=1000)
    assert comparison.corpora == {"A": 50.0, "B": 0.0}
    assert comparison.difference.mean == 0.25


def test_only_classes_that_both_know_are_asked_and_may_be_chosen():
    clips = held_out("A/1", "A/2", "B/1")
    ours = contestant(["A/1", "A/2", "B/1"], ["A/1", "A/1", "B/1"])
    theirs = contestant(["C/1", "A/2", "A/1"], ["C/1", "A/2", "C/1"])
    comparison = compare(ours, theirs, clips, seed=0, resamples=1000)
    assert comparison.classes == ("A/1", "A/2")
    assert comparison.clips == 2
    # Without C/1 the opponent's first choice among equals is the first shared class, A/1.
    assert hits(theirs, clips.truth, comparison.classes).tolist() == [1.0, 1.0, 0.0]


def test_no_class_in_common_is_an_error():
    with pytest.raises(DataError, match="both know"):
        compare(
            contestant(["A/1"], ["A/1"]),
            contestant(["B/1"], ["B/1"]),
            held_out("A/1"),
            seed=0,
            resamples=1000,
        )


def test_the_baseline_chooses_the_commonest_training_class_of_each_corpus():
    clips = held_out("A/1", "A/2", "B/1", "B/2", "B/2")
    train = np.array(["A/2", "A/2", "A/1", "B/1", "B/2", "B/1"])
    baseline = majority(
        clips, train_truth=train, train_corpus=np.array([c.split("/")[0] for c in train])
    )
    assert hits(baseline, clips.truth, baseline.classes).tolist() == [0, 1, 1, 0, 0]


@pytest.mark.parametrize(
    ("interval", "margin", "expected"),
    [
        ((0.02, 0.001, 0.04), 0.0, Verdict.PROMOTE),
        ((0.02, 0.0, 0.04), 0.0, Verdict.HOLD),  # the bound itself is not enough
        ((0.02, -0.001, 0.04), 0.0, Verdict.HOLD),
        ((0.0, 0.0, 0.0), 0.0, Verdict.HOLD),  # the champion itself
        ((-0.02, -0.04, -0.001), 0.0, Verdict.HOLD),
        ((0.02, -0.009, 0.04), 1.0, Verdict.PROMOTE),
        ((0.02, -0.011, 0.04), 1.0, Verdict.HOLD),
        ((-0.001, -0.005, 0.004), 1.0, Verdict.HOLD),  # a margin never lets a worse one pass
    ],
)
def test_the_rule_wants_a_difference_above_0_and_a_lower_bound_above_the_margin(
    interval, margin, expected
):
    assert verdict(*interval, margin=margin) is expected


def test_the_reason_names_both_sides_their_figures_and_the_rule():
    _, why = judge(compared(0.02, -0.001, 0.04), candidate="new", opponent="old", margin=0.5)
    for part in ("new", "old", "52.0%", "50.0%", "100 held-out", "+2.00", "-0.10", "-0.5"):
        assert part in why
