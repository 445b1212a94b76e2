import dataclasses
import json

import numpy as np
import pytest

from protocol.errors import DataError, RefusedError, RunFailedError, UsageError
from protocol.results import Results, read_report
from protocol.stage_env import StageEnvironment
from protocol.states import Result
from trainer.bundle import BASE, MODEL, Manifest, open_bundle, write_bundle
from trainer.champion import load_champion, promote
from trainer.classifier import Classifier
from trainer.export import ShippedModel, to_onnx
from trainer.gate import GateConfig, find_bundle, gate, prepare
from trainer.model import ClipEncoder, EncoderConfig, save_encoder
from trainer.pool.build import build_pool, preprocess
from trainer.run import open_run


@pytest.fixture
def judge(runs, pool_path):
    """Run the gate on an export run and record it, as the command does."""

    def run_gate(export_id="export.0002.0000", **settings):
        with open_run("gate", output=runs, environ={}) as run:
            config = GateConfig(pool=pool_path, from_run=export_id, **settings)
            report = gate(config, run)
            run.finish(report)
        return report

    return run_gate


@pytest.fixture
def champion(runs):
    """The run id of the present champion, or None."""

    def run_id():
        found = load_champion(runs / "store")
        return found and found.promotion.run_id

    return run_id


def shipped(runs, number):
    run_id = f"export.{number:04d}.0000"
    return runs / "artifacts" / run_id / f"{run_id}.ship"


def rewrite(runs, run_id, change):
    """Change a record of results.json as a program could that computes the digest too."""
    results = Results.load(runs / "results.json")
    results.add(change(results.runs[run_id]))
    results.save(runs / "results.json")


def foreign_champion(runs, tmp_path, classes, length=128):
    """Promote an untrained model with classes and a clip length of its own."""
    encoder = ClipEncoder(EncoderConfig(length=length, width=8, depth=1, heads=1))
    model = ShippedModel(Classifier(encoder, classes)).eval()
    (tmp_path / "m.onnx").write_bytes(to_onnx(model, length))
    save_encoder(tmp_path / "e.safetensors", encoder, {})
    manifest = Manifest(
        run_id="export.0077.abcd",
        stage="export",
        arm="full",
        inputs={},
        preprocessing={"length": length},
        config={},
        classes=classes,
        metrics={},
        data_hash="another pool",
        code_hash="",
    )
    members = {MODEL: tmp_path / "m.onnx", BASE: tmp_path / "e.safetensors"}
    bundle = write_bundle(tmp_path / "c.ship", manifest, members)
    promote(runs / "store", bundle, against="", now=0.0)


def test_the_first_good_bundle_is_promoted_against_the_majority_class(judge, champion, runs):
    report = judge("export.0002.0000")
    assert report.verdict == "promote"
    assert report.metrics["difference_low_pp"] > 0
    assert report.detail["champion"] is None
    assert "majority class" in report.detail["why"]
    assert champion() == "export.0002.0000"
    assert report.inputs["export"] == "export.0002.0000"
    assert report.detail["bundle"]["sha256"] == open_bundle(shipped(runs, 2)).sha256


def test_a_bundle_that_is_no_better_than_the_majority_class_is_held(judge, champion):
    # A margin is for a candidate against a champion; it lets nothing trivial in.
    report = judge("export.0003.0000", margin=50.0)
    assert report.verdict == "hold"
    assert report.metrics["difference_low_pp"] <= 0
    assert champion() is None


def test_a_better_bundle_beats_the_champion_and_a_worse_one_is_held(judge, champion, runs):
    assert judge("export.0001.0000").verdict == "promote"
    better = judge("export.0002.0000")
    assert better.verdict == "promote"
    assert better.metrics["difference_low_pp"] > 0
    assert champion() == "export.0002.0000"
    assert load_champion(runs / "store").previous.run_id == "export.0001.0000"

    worse = judge("export.0001.0000")
    assert worse.verdict == "hold"
    assert worse.metrics["difference_pp"] == -better.metrics["difference_pp"]
    assert champion() == "export.0002.0000"


def test_the_champion_does_not_beat_itself(judge):
    judge("export.0002.0000")
    again = judge("export.0002.0000")
    assert again.verdict == "hold"
    assert again.metrics["difference_pp"] == 0
    assert set(again.detail["corpora_pp"].values()) == {0.0}


def test_every_arm_is_compared_and_the_shipped_one_as_the_bundle_is(judge):
    judge("export.0001.0000")
    report = judge("export.0002.0000")
    arms = report.detail["arms"]
    assert set(arms) == {"full", "lp-ft"}
    # The arm runs in torch, the bundle in onnxruntime: the same model, up to near-ties.
    shipped_arm = arms[report.detail["bundle"]["arm"]]
    assert shipped_arm["difference_pp"] == pytest.approx(report.metrics["difference_pp"], abs=0.2)
    assert report.metrics["difference_pp/full"] == arms["full"]["difference_pp"]
    total = sum(report.detail["corpora_pp"].values())
    assert np.isfinite(total)
    assert len(report.detail["corpora_pp"]) == 6


def test_a_dry_run_judges_and_promotes_nothing(judge, champion):
    assert judge(dry_run=True).verdict == "promote"
    assert champion() is None


def test_a_hold_can_be_an_error_and_is_recorded_all_the_same(judge, runs):
    judge("export.0002.0000")
    with pytest.raises(RunFailedError, match="held-out") as caught:
        judge("export.0001.0000", fail_on_hold=True)
    assert caught.value.exit_code == 8
    results = Results.load(runs / "results.json")
    assert results.find("gate.0002.0000", "gate").verdict == "hold"


def test_a_gate_that_died_after_promoting_keeps_its_verdict(runs, pool_path, champion):
    config = GateConfig(pool=pool_path, from_run="export.0002.0000")
    with open_run("gate", output=runs, environ={}) as run:
        before = gate(config, run)  # and dies before run.finish
    assert champion() == "export.0002.0000"
    with open_run("gate", output=runs, run_id=run.run_id, environ={}) as again:
        assert again.attempt == 2
        assert gate(config, again) == before
    # Another run is another question.
    with open_run("gate", output=runs, environ={}) as other:
        assert gate(config, other).verdict == "hold"


def test_a_champion_that_changed_while_judging_is_not_replaced(runs, pool_path, monkeypatch):
    config = GateConfig(pool=pool_path, from_run="export.0002.0000")

    def judged_meanwhile(*args, **kwargs):
        promote(runs / "store", open_bundle(shipped(runs, 1)), against="", now=0.0)
        return promote(*args, **kwargs)

    monkeypatch.setattr("trainer.gate.promote", judged_meanwhile)
    with open_run("gate", output=runs, environ={}) as run, pytest.raises(RefusedError):
        gate(config, run)
    assert load_champion(runs / "store").promotion.run_id == "export.0001.0000"


def test_results_edited_by_hand_are_an_error(judge, runs, champion):
    path = runs / "results.json"
    value = json.loads(path.read_text())
    value["runs"]["export.0002.0000"]["report"]["metrics"]["validation_accuracy"] = 1.0
    path.write_text(json.dumps(value))
    with pytest.raises(DataError, match="changed since it was written"):
        judge()
    assert champion() is None


def test_a_bundle_that_is_not_the_one_reported_is_an_error(judge, runs, champion):
    shipped(runs, 2).write_bytes(shipped(runs, 1).read_bytes())
    with pytest.raises(DataError, match="its run reported"):
        judge()
    assert champion() is None


def test_a_bundle_of_another_run_is_an_error_even_if_the_results_name_it(runs, judge, champion):
    shipped(runs, 2).write_bytes(shipped(runs, 1).read_bytes())

    def foreign(record):
        stale = Results.load(runs / "results.json").runs["export.0001.0000"].report
        bundle = dataclasses.replace(
            stale.artifacts["bundle"], path=record.report.artifacts["bundle"].path
        )
        artifacts = {**record.report.artifacts, "bundle": bundle}
        report = dataclasses.replace(record.report, artifacts=artifacts)
        return dataclasses.replace(record, report=report)

    rewrite(runs, "export.0002.0000", foreign)
    with pytest.raises(DataError, match=r"the bundle is of run export\.0001\.0000"):
        judge()
    assert champion() is None


def test_a_run_that_failed_or_is_missing_is_an_error(judge, runs):
    rewrite(
        runs, "export.0002.0000", lambda r: dataclasses.replace(r, result=Result.FAILED, cause="x")
    )
    with pytest.raises(DataError, match="ended as failed"):
        judge("export.0002.0000")
    with pytest.raises(DataError, match="no such run"):
        judge("export.0009.0000")


def test_a_run_of_another_stage_is_an_error(judge):
    with pytest.raises(UsageError, match="stage 'export'"):
        judge("finetune.0002.0000")


def test_a_bundle_cut_short_is_an_error(judge, runs):
    shipped(runs, 2).write_bytes(shipped(runs, 2).read_bytes()[:-100])
    with pytest.raises(DataError, match="bytes long"):
        judge()


def test_without_a_run_id_the_newest_export_is_judged(runs):
    with open_run("gate", output=runs, environ={}) as run:
        assert find_bundle(run).manifest.run_id == "export.0003.0000"


def test_under_a_runner_the_export_that_it_names_is_judged_and_not_the_newest(
    runs, tmp_path, pool_path
):
    environment = StageEnvironment(
        run_id="gate.0005.7f3a",
        stage="gate",
        attempt=1,
        checkpoint_dir=tmp_path / "checkpoints",
        artifact_dir=runs / "artifacts" / "gate.0005.7f3a",
        result_file=tmp_path / "result.json",
        progress_file=tmp_path / "progress.json",
        store=tmp_path / "durable",
        payload=tmp_path,
        results=runs / "results.json",
        after={"export": "export.0001.0000"},
    )
    with open_run("gate", output=tmp_path, environ=environment.to_environ()) as run:
        run.finish(gate(GateConfig(pool=pool_path), run))
    report = read_report(tmp_path / "result.json", run_id="gate.0005.7f3a", stage="gate")
    assert report.verdict == "promote"
    assert report.inputs["export"] == "export.0001.0000"
    assert load_champion(tmp_path / "durable").promotion.run_id == "export.0001.0000"


def test_a_pool_that_was_not_trained_on_is_an_error(runs, tmp_path):
    build_pool(tmp_path / "other", corpora=["GunPoint", "ArrowHead"])
    with (
        open_run("gate", output=runs, environ={}) as run,
        pytest.raises(DataError, match="content hash"),
    ):
        gate(GateConfig(pool=tmp_path / "other"), run)


def test_a_champion_with_other_classes_and_length_is_judged_on_what_both_know(
    judge, runs, tmp_path
):
    classes = ("Unheard/1", "GunPoint/2", "GunPoint/1")
    foreign_champion(runs, tmp_path, classes, length=64)
    report = judge("export.0002.0000")
    assert report.metrics["clips"] == 150  # GunPoint's test clips
    assert report.detail["classes_compared"] == 2
    left_out = report.detail["classes_left_out"]
    assert left_out["champion export.0077.abcd"] == ["Unheard/1"]
    assert len(left_out["candidate export.0002.0000"]) == 31
    assert set(report.detail["corpora_pp"]) == {"GunPoint"}


def test_a_champion_without_a_class_in_common_is_an_error(judge, runs, tmp_path):
    foreign_champion(runs, tmp_path, ("Unheard/1", "Unheard/2"))
    with pytest.raises(DataError, match="both know"):
        judge()


def test_clips_are_resampled_as_the_bundle_says(pool):
    clips = pool.clips(np.arange(3))
    assert prepare(clips, {"length": 128}) is clips
    half = prepare(clips, {"length": 64})
    assert half.shape == (3, 64)
    assert half[1] == pytest.approx(preprocess(clips[1].astype(np.float64), 64))
    for wrong in ({}, {"length": "128"}, {"length": 0}):
        with pytest.raises(DataError, match="length"):
            prepare(clips, wrong)


@pytest.mark.parametrize("settings", [{"margin": -1.0}, {"resamples": 10}, {"threads": 0}])
def test_a_setting_out_of_range_is_refused_by_name(settings):
    with pytest.raises(UsageError, match=next(iter(settings))):
        GateConfig(**settings)
