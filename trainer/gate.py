"""Stage `gate`: is the exported bundle better than the champion? Promote it, or hold it.

Both are run under onnxruntime on the pool's held-out test clips, which no stage has trained on or
chosen by. The verdict rests on the difference in accuracy, clip by clip, with a 95% interval of
the paired bootstrap:

    promote when the difference is above 0 and its lower bound is above -margin

With the default margin of 0 the candidate has to be better beyond doubt; about one in forty
candidates that are no better passes by chance, and each gate draws on the same clips. A margin
(in percentage points) turns the rule into one of non-inferiority, for a candidate that is wanted
for other reasons. Without a champion the opponent is the most frequent class of the clip's corpus
among the training labels, and the margin is 0 whatever was asked.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from protocol.errors import DataError, RunFailedError
from protocol.names import RunId
from protocol.publish import publish_json
from protocol.results import StageReport
from trainer.bootstrap import MIN_RESAMPLES
from trainer.bundle import MODEL, Bundle, open_bundle
from trainer.champion import Champion, load_champion, promote
from trainer.classifier import load_classifier
from trainer.config import as_json, require, require_seed, require_threads
from trainer.console import say
from trainer.data import Part, split_indices
from trainer.devices import set_up_torch
from trainer.evaluate import Clips, onnx_logits, onnx_session, torch_logits
from trainer.export import check_data, timed
from trainer.files import read_record, writing
from trainer.hashing import code_hash
from trainer.judge import Comparison, Contestant, HeldOut, Verdict, compare, judge, majority
from trainer.pool.build import preprocess
from trainer.pool.format import Pool, open_pool
from trainer.run import Run

JUDGED = "judged.json"


@dataclass(frozen=True, kw_only=True)
class GateConfig:
    """How to judge."""

    pool: Path = Path("pool")
    """Folder of the pool that was trained on; its held-out clips decide."""

    from_run: str | None = None
    """The export run to judge; by default the newest one."""

    margin: float = 0.0
    """Percentage points by which the lower bound may lie below 0, given a champion."""

    resamples: int = 10_000
    """Resamples of the paired bootstrap."""

    seed: int = 0
    """Seed of the bootstrap."""

    threads: int = 1
    """CPU threads of torch and onnxruntime."""

    dry_run: bool = False
    """Judge without promoting."""

    fail_on_hold: bool = False
    """Make a hold an error, exit code 8."""

    def __post_init__(self) -> None:
        require_seed("gate", self.seed)
        require_threads("gate", self.threads)
        limits = {"margin": (0, 100), "resamples": (MIN_RESAMPLES, 10**7)}
        for field, (low, high) in limits.items():
            value = getattr(self, field)
            require("gate", field, value, holds=low <= value <= high, right=f"{low} to {high}")


def gate(config: GateConfig, run: Run) -> StageReport:
    """Judge the bundle of the export run that this run builds on, and promote it if it is better.

    A gate that was interrupted after promoting gives, when run again, the verdict that it had
    reached. Raises DataError when the bundle is not the one that its run reported, is of another
    run, or was trained on another pool; RunFailedError on a hold, if so configured.
    """
    set_up_torch(device="cpu", threads=config.threads)
    bundle = find_bundle(run, config.from_run)
    pool = open_pool(config.pool)
    check_data(pool.content_hash, bundle.manifest.data_hash, pool.folder, of="the bundle")
    champion = load_champion(run.store)
    report = _earlier_report(run, bundle, champion)
    if report is None:
        report = _judge(config, run, pool, bundle, champion)
        if report.verdict == Verdict.PROMOTE and not config.dry_run:
            _promote(run, bundle, champion, report)
    if config.fail_on_hold and report.verdict == Verdict.HOLD:
        run.finish(report)
        raise RunFailedError("hold", why=report.detail["why"])
    say(f"{report.verdict}: {report.detail['why']}")
    return report


def find_bundle(run: Run, from_run: str | None = None) -> Bundle:
    """Return the verified bundle of exactly the export run that `run` builds on.

    Raises DataError when results, file and the bundle's own manifest do not agree.
    """
    export_id = run.input_run("export", from_run)
    reported = run.input_report("export", export_id)
    bundle = open_bundle(run.input_artifact("export", export_id, "bundle"))
    says = (bundle.manifest.run_id, bundle.manifest.stage, bundle.manifest.data_hash)
    if says != (reported.run_id, reported.stage, reported.data_hash):
        raise DataError(
            f"judge run {export_id}",
            path=bundle.path,
            why=f"the bundle is of run {bundle.manifest.run_id}, or of other data",
            hint="Export again.",
        )
    return bundle


def prepare(clips: Clips, preprocessing: Mapping[str, Any]) -> Clips:
    """Return a pool's clips (n, T) as a bundle wants them: resampled linearly to its own length.

    Raises DataError when the bundle does not say its length.
    """
    length = preprocessing.get("length")
    if not isinstance(length, int) or length < 1:
        raise DataError("prepare clips", why=f"the bundle's preprocessing has length {length!r}")
    if length == clips.shape[1]:
        return clips
    return np.stack([preprocess(clip.astype(np.float64), length) for clip in clips])


@dataclass(frozen=True, kw_only=True, eq=False)
class _Judged:
    """What a judgement rests on: the bundle's comparison, and each arm's with the same opponent."""

    candidate: Contestant
    opponent: Contestant
    comparison: Comparison
    arms: Mapping[str, Comparison]


def _judge(
    config: GateConfig, run: Run, pool: Pool, bundle: Bundle, champion: Champion | None
) -> StageReport:
    durations: dict[str, float] = {}
    with timed(durations, "judge"):
        judged = _compare_all(config, run, pool, bundle, champion)
    margin = 0.0 if champion is None else config.margin
    verdict, why = judge(
        judged.comparison,
        candidate=judged.candidate.name,
        opponent=judged.opponent.name,
        margin=margin,
    )
    return StageReport(
        run_id=run.run_id,
        stage=run.stage,
        verdict=verdict,
        metrics=_metrics(judged),
        data_hash=pool.content_hash,
        code_hash=code_hash(),
        config=as_json(config),
        seed=config.seed,
        durations=durations,
        inputs={**bundle.manifest.inputs, "export": bundle.manifest.run_id},
        detail={
            "why": why,
            "margin": margin,
            "dry_run": config.dry_run,
            "bundle": _identity(bundle),
            "champion": None if champion is None else _identity(champion.bundle),
            **_detail(judged),
        },
    )


def _compare_all(
    config: GateConfig, run: Run, pool: Pool, bundle: Bundle, champion: Champion | None
) -> _Judged:
    rows = split_indices(pool, Part.TEST)
    clips = pool.clips(rows)
    held_out = HeldOut(truth=pool.row_classes[rows], corpus=pool.corpus[rows])
    arms = _arms(run, bundle, clips)
    candidate = _bundle_contestant("candidate", bundle, clips, threads=config.threads)
    if champion is None:
        opponent = _baseline(pool, held_out)
    else:
        opponent = _bundle_contestant("champion", champion.bundle, clips, threads=config.threads)
    comparisons = []
    for done, contestant in enumerate([candidate, *arms.values()]):
        run.progress(done, len(arms) + 1, "comparison", contestant.name)
        comparisons.append(
            compare(contestant, opponent, held_out, seed=config.seed, resamples=config.resamples)
        )
    return _Judged(
        candidate=candidate,
        opponent=opponent,
        comparison=comparisons[0],
        arms=dict(zip(arms, comparisons[1:], strict=True)),
    )


def _bundle_contestant(role: str, bundle: Bundle, clips: Clips, *, threads: int) -> Contestant:
    manifest = bundle.manifest
    session = onnx_session(bundle.read(MODEL), threads=threads)
    logits = onnx_logits(session, prepare(clips, manifest.preprocessing))
    return Contestant(name=f"{role} {manifest.run_id}", classes=manifest.classes, logits=logits)


def _arms(run: Run, bundle: Bundle, clips: Clips) -> dict[str, Contestant]:
    """Return every arm of the fine-tuning run that the bundle comes from, from its weights."""
    tuned = RunId.parse(bundle.manifest.inputs["finetune"])
    report = run.input_report("finetune", str(replace(tuned, arm="")))
    contestants = {}
    for name, arm in report.arms.items():
        model, _ = load_classifier(run.input_artifact("finetune", arm.run_id, "classifier"))
        contestants[name] = Contestant(
            name=arm.run_id, classes=model.classes, logits=torch_logits(model, clips)
        )
    return contestants


def _baseline(pool: Pool, held_out: HeldOut) -> Contestant:
    train = ~pool.split.is_(Part.TEST)
    return majority(held_out, train_truth=pool.row_classes[train], train_corpus=pool.corpus[train])


def _metrics(judged: _Judged) -> dict[str, float]:
    comparison = judged.comparison
    return {
        "accuracy": comparison.accuracy,
        "opponent_accuracy": comparison.opponent_accuracy,
        "clips": float(comparison.clips),
        **_points(comparison),
        **{f"difference_pp/{name}": _points(c)["difference_pp"] for name, c in judged.arms.items()},
    }


def _points(comparison: Comparison) -> dict[str, float]:
    """Return the difference and the ends of its interval in percentage points."""
    interval = comparison.difference
    ends = {"": interval.mean, "_low": interval.low, "_high": interval.high}
    return {f"difference{end}_pp": round(100.0 * value, 6) for end, value in ends.items()}


def _detail(judged: _Judged) -> dict[str, Any]:
    shared = set(judged.comparison.classes)
    return {
        "opponent": judged.opponent.name,
        "confidence": judged.comparison.difference.confidence,
        "corpora_pp": dict(judged.comparison.corpora),
        "arms": {
            name: {"accuracy": c.accuracy, **_points(c), "corpora_pp": dict(c.corpora)}
            for name, c in judged.arms.items()
        },
        "classes_compared": len(shared),
        "classes_left_out": {
            side.name: sorted(set(side.classes) - shared)
            for side in (judged.candidate, judged.opponent)
        },
    }


def _identity(bundle: Bundle) -> dict[str, str]:
    manifest = bundle.manifest
    return {"run_id": manifest.run_id, "arm": manifest.arm, "sha256": bundle.sha256}


def _promote(run: Run, bundle: Bundle, champion: Champion | None, report: StageReport) -> None:
    # The verdict is durable before the champion changes: a gate that dies between the two would
    # find its candidate to be the champion, and judge it against itself.
    judged = run.checkpoint_dir / JUDGED
    with writing("keep the verdict", judged):
        publish_json(judged, report.to_json())
    against = "" if champion is None else champion.promotion.sha256
    promote(run.store, bundle, against=against, now=time.time())


def _earlier_report(run: Run, bundle: Bundle, champion: Champion | None) -> StageReport | None:
    """Return what an earlier attempt of this run reported before it promoted this bundle."""
    if champion is None or champion.promotion.sha256 != bundle.sha256:
        return None
    path = run.checkpoint_dir / JUDGED
    hint = "Move it away to judge anew; the champion stays."
    report = read_record(StageReport, path, what="read the earlier verdict", hint=hint)
    if report is None:
        return None
    same = report.run_id == run.run_id and report.detail.get("bundle") == _identity(bundle)
    return report if same else None
