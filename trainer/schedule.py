"""Learning rates as plain functions of the step: no state, so nothing to restore.

A step is counted from 0; a schedule of `total` steps is asked for steps 0 to `total` - 1. Within
them every rate is strictly positive, unless its function says where it is 0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from protocol.errors import UsageError


def warmup_cosine(step: int, *, total: int, warmup: int, peak: float, floor: float = 0.0) -> float:
    """Return the rate of a linear warm-up followed by half a cosine (arXiv 1608.03983, eq. 5).

    Rises in `warmup` steps to `peak`, reached at step `warmup` - 1, then falls towards `floor`,
    which it meets at step `total`: the last step's rate is still above it.
    Raises UsageError when `warmup` is not within 0 to `total`, or a rate is negative.
    """
    _check(total=total, warmup=warmup, peak=peak, floor=floor)
    if step < warmup:
        return peak * (step + 1) / warmup
    if step >= total:
        return floor
    share = (step - warmup) / (total - warmup)
    return floor + (peak - floor) * 0.5 * (1.0 + math.cos(math.pi * share))


def warmup_stable_decay(
    step: int, *, total: int, warmup: int, decay: int, peak: float, floor: float = 0.0
) -> float:
    """Return the rate of a warm-up, a plateau, and a linear decay (WSD: arXiv 2404.06395).

    The last `decay` steps fall linearly towards `floor`, which is met at step `total`.
    Raises UsageError when `warmup` + `decay` is more than `total`, or a rate is negative.
    """
    _check(total=total, warmup=warmup + decay, peak=peak, floor=floor)
    if step < warmup:
        return peak * (step + 1) / warmup
    if step < total - decay:
        return peak
    return floor + (peak - floor) * max(total - step, 0) / (decay + 1)


@dataclass(frozen=True, kw_only=True)
class Rates:
    """The learning rates of one step, by parameter group."""

    head: float
    encoder: float


def lp_ft_rates(
    step: int,
    *,
    probe_steps: int,
    total_steps: int,
    warmup: int,
    probe_peak: float,
    head_peak: float,
    encoder_peak: float,
) -> Rates:
    """Return the rates of a linear probe of `probe_steps`, then fine-tuning to `total_steps`.

    LP-FT is of Kumar et al. 2022 (arXiv 2202.10054). In the probe, steps 0 to `probe_steps` - 1,
    the encoder's rate is exactly 0 and the head follows a cosine from `probe_peak`. From step
    `probe_steps` on both groups warm up again over `warmup` steps and follow a cosine from peaks
    of their own; there the encoder's rate is strictly positive at every step below `total_steps`.
    Full fine-tuning is the case of `probe_steps` 0.
    Raises UsageError when `probe_steps` is not within 0 to `total_steps`.
    """
    if not 0 <= probe_steps <= total_steps:
        raise UsageError(
            "LP-FT schedule",
            why=f"probe_steps is {probe_steps}; it must be within 0 to total_steps, {total_steps}",
        )
    if step < probe_steps:
        ramp = min(warmup, probe_steps)
        probe = warmup_cosine(step, total=probe_steps, warmup=ramp, peak=probe_peak)
        return Rates(head=probe, encoder=0.0)
    at, total = step - probe_steps, total_steps - probe_steps
    ramp = min(warmup, total)
    return Rates(
        head=warmup_cosine(at, total=total, warmup=ramp, peak=head_peak),
        encoder=warmup_cosine(at, total=total, warmup=ramp, peak=encoder_peak),
    )


def _check(*, total: int, warmup: int, peak: float, floor: float) -> None:
    if not 0 <= warmup <= total:
        raise UsageError(
            "learning-rate schedule",
            why=f"warm-up (and decay) take {warmup} steps of {total}",
            hint="Make them fit, or train for longer.",
        )
    if not 0.0 <= floor <= peak:
        raise UsageError(
            "learning-rate schedule",
            why=f"peak {peak} and floor {floor}: right is 0 <= floor <= peak",
        )
