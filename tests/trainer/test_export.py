import copy

import numpy as np
import onnx
import pytest
import torch

from protocol.errors import DataError, UsageError
from protocol.names import RunId
from protocol.results import Results
from trainer.bundle import BASE, MODEL, open_bundle
from trainer.classifier import load_classifier
from trainer.evaluate import onnx_logits, onnx_session, torch_logits
from trainer.export import (
    ExportConfig,
    ShippedModel,
    check_parity,
    export,
    find_arm,
    to_onnx,
)
from trainer.model import load_encoder
from trainer.pool.build import build_pool
from trainer.run import open_run


@pytest.fixture(scope="module")
def exported(finished_runs):
    """The report of export.0002 and the folder of its artefacts."""
    results = Results.load(finished_runs / "results.json")
    return results.find("export.0002.0000", "export"), finished_runs / "artifacts"


@pytest.fixture(scope="module")
def shipped(exported):
    report, artifacts = exported
    run_id = RunId.parse(report.inputs["finetune"])
    folder = artifacts / "finetune.0002.0000" / run_id.arm
    return ShippedModel(load_classifier(folder / "classifier.safetensors")[0]).eval()


@pytest.fixture(scope="module")
def onnx_path(exported):
    return exported[1] / "export.0002.0000" / MODEL


@pytest.fixture(scope="module")
def clips(pool):
    return pool.clips(np.flatnonzero(pool.split.is_("test"))[::20])


def test_the_best_arm_by_validation_is_exported(finished_runs, exported):
    report, _ = exported
    results = Results.load(finished_runs / "results.json")
    arms = results.find("finetune.0002.0000", "finetune").arms
    best = max(arms.values(), key=lambda arm: arm.metrics["validation_accuracy"])
    assert report.inputs["finetune"] == best.run_id
    assert report.inputs["pretrain"] == "pretrain.0001.0000"
    assert report.metrics["validation_accuracy"] == best.metrics["validation_accuracy"]


@pytest.mark.parametrize("wanted", [{"arm": "LP_FT"}, {"from_run": "finetune.0001.0000.lp-ft"}])
def test_an_arm_can_be_named_by_itself_or_in_the_run_id(runs, wanted):
    run = open_run("export", output=runs, environ={})
    assert RunId.parse(find_arm(run, **wanted).run_id).arm == "lp-ft"


def test_an_unknown_arm_is_an_error_that_lists_the_arms(runs):
    run = open_run("export", output=runs, environ={})
    for arm in ("half", "../full"):
        with pytest.raises(UsageError, match="full, lp-ft"):
            find_arm(run, arm=arm)


def test_two_arms_named_at_once_are_refused(runs):
    run = open_run("export", output=runs, environ={})
    named = "finetune.0001.0000.full"
    with pytest.raises(UsageError, match="'full' and 'lp-ft'"):
        find_arm(run, arm="lp-ft", from_run=named)
    assert find_arm(run, arm="full", from_run=named).run_id == named


def test_the_onnx_file_takes_any_batch_and_says_nothing_of_our_files(onnx_path):
    model = onnx.load(onnx_path)
    onnx.checker.check_model(model, full_check=True)
    dims = model.graph.input[0].type.tensor_type.shape.dim
    assert dims[0].dim_param
    assert dims[1].dim_value == 128
    assert [entry.version for entry in model.opset_import if entry.domain == ""] == [20]
    data = onnx_path.read_bytes()
    assert b".py" not in data


@pytest.mark.parametrize("size", [1, 7, 64])
def test_onnxruntime_agrees_with_torch_at_every_batch_size(onnx_path, shipped, clips, size):
    session = onnx_session(onnx_path.read_bytes())
    theirs = onnx_logits(session, clips, batch_size=size)
    assert np.abs(theirs - torch_logits(shipped, clips)).max() <= 1e-4


def test_the_graph_normalises_raw_clips_itself(onnx_path, clips):
    session = onnx_session(onnx_path.read_bytes())
    logits = onnx_logits(session, clips)
    raw = (clips * 37.5 + 12).astype(np.float32)
    assert onnx_logits(session, raw) == pytest.approx(logits, abs=1e-3)
    flat = np.full((2, 128), 5, dtype=np.float32)
    assert np.isfinite(onnx_logits(session, flat)).all()


def test_the_same_model_makes_the_same_onnx_bytes(onnx_path, shipped):
    assert to_onnx(shipped, 128) == onnx_path.read_bytes()


def test_a_graph_that_differs_from_torch_does_not_pass(onnx_path, shipped, clips):
    assert check_parity(shipped, onnx_path, clips, threads=1) <= 1e-4
    other = copy.deepcopy(shipped)
    with torch.no_grad():
        other.classifier.head.bias[0] += 2e-4
    with pytest.raises(DataError, match="differ"):
        check_parity(other, onnx_path, clips, threads=1)
    with torch.no_grad():
        other.classifier.head.bias[0] = float("nan")
    with pytest.raises(DataError, match="differ"):
        check_parity(other, onnx_path, clips, threads=1)


def test_the_bundle_holds_the_exported_files_and_their_story(exported, onnx_path, pool):
    report, artifacts = exported
    folder = artifacts / "export.0002.0000"
    bundle = open_bundle(folder / report.artifacts["bundle"].path)
    manifest = bundle.manifest
    assert bundle.sha256 == report.artifacts["bundle"].sha256
    assert bundle.read(MODEL) == onnx_path.read_bytes()
    assert bundle.read(BASE) == (folder / "encoder.safetensors").read_bytes()
    assert (manifest.run_id, manifest.stage) == ("export.0002.0000", "export")
    assert manifest.classes == pool.classes
    assert manifest.data_hash == pool.content_hash
    assert manifest.preprocessing["length"] == 128
    assert manifest.config["finetune"]["epochs"] == 30


def test_the_encoder_is_that_of_the_exported_arm(exported, shipped):
    _, artifacts = exported
    encoder, meta = load_encoder(artifacts / "export.0002.0000" / "encoder.safetensors")
    expected = shipped.classifier.encoder.state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in encoder.state_dict().items())
    assert meta["run_id"] == "export.0002.0000"


def test_another_pool_is_an_error(runs, tmp_path):
    build_pool(tmp_path / "other", corpora=["GunPoint", "ArrowHead"])
    with (
        open_run("export", output=runs, environ={}) as run,
        pytest.raises(DataError, match="content hash"),
    ):
        export(ExportConfig(pool=tmp_path / "other"), run)


def test_an_arms_weights_that_were_cut_short_are_an_error(runs, pool_path):
    path = runs / "artifacts" / "finetune.0002.0000" / "full" / "classifier.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    config = ExportConfig(pool=pool_path, from_run="finetune.0002.0000", arm="full")
    with (
        open_run("export", output=runs, environ={}) as run,
        pytest.raises(DataError, match="bytes long"),
    ):
        export(config, run)
