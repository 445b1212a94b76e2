import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import UsageError
from trainer.schedule import lp_ft_rates, warmup_cosine, warmup_stable_decay


def lp_ft(step, *, probe_steps, total_steps, warmup=3):
    return lp_ft_rates(
        step,
        probe_steps=probe_steps,
        total_steps=total_steps,
        warmup=warmup,
        probe_peak=1e-2,
        head_peak=1e-3,
        encoder_peak=1e-4,
    )


def test_a_cosine_has_the_values_of_its_formula():
    rates = [warmup_cosine(s, total=6, warmup=2, peak=1.0) for s in range(7)]
    cosine = [0.5 * (1 + math.cos(math.pi * k / 4)) for k in range(4)]
    assert rates == pytest.approx([0.5, 1.0, *cosine, 0.0])


def test_a_plateau_has_the_values_of_its_formula():
    rates = [
        warmup_stable_decay(s, total=8, warmup=2, decay=3, peak=4.0, floor=0.0) for s in range(9)
    ]
    assert rates == pytest.approx([2.0, 4.0, 4.0, 4.0, 4.0, 3.0, 2.0, 1.0, 0.0])


@given(st.integers(1, 300), st.data())
def test_every_step_within_a_schedule_has_a_positive_rate_up_to_its_peak(total, data):
    warmup = data.draw(st.integers(0, total))
    decay = data.draw(st.integers(0, total - warmup))
    for step in range(total):
        assert 0 < warmup_cosine(step, total=total, warmup=warmup, peak=0.3) <= 0.3
        rate = warmup_stable_decay(step, total=total, warmup=warmup, decay=decay, peak=0.3)
        assert 0 < rate <= 0.3


@given(st.integers(0, 60), st.integers(1, 60), st.integers(0, 80))
def test_the_encoder_rests_in_the_probe_and_moves_at_every_step_after_it(probe, tune, warmup):
    for step in range(probe + tune):
        rates = lp_ft(step, probe_steps=probe, total_steps=probe + tune, warmup=warmup)
        assert rates.head > 0
        assert rates.encoder == 0 if step < probe else rates.encoder > 0


def test_each_phase_reaches_its_own_peak():
    rates = [lp_ft(step, probe_steps=10, total_steps=30) for step in range(30)]
    assert max(r.head for r in rates[:10]) == 1e-2
    assert max(r.head for r in rates[10:]) == 1e-3
    assert max(r.encoder for r in rates) == 1e-4


@pytest.mark.parametrize(
    "call",
    [
        lambda: warmup_cosine(0, total=5, warmup=6, peak=1.0),
        lambda: warmup_cosine(0, total=5, warmup=-1, peak=1.0),
        lambda: warmup_cosine(0, total=5, warmup=1, peak=-1.0),
        lambda: warmup_cosine(0, total=5, warmup=1, peak=0.1, floor=0.2),
        lambda: warmup_stable_decay(0, total=5, warmup=3, decay=3, peak=1.0),
        lambda: lp_ft(0, probe_steps=6, total_steps=5),
    ],
)
def test_a_schedule_that_does_not_fit_is_refused(call):
    with pytest.raises(UsageError, match=r"right is|must be|take"):
        call()
