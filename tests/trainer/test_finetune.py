import copy
import json
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch

from protocol.errors import DataError, UsageError
from protocol.results import Results
from trainer.arms import Arm
from trainer.base import Base, load_base
from trainer.bundle import BASE, open_bundle
from trainer.champion import promote
from trainer.classifier import Classifier, load_classifier
from trainer.data import ClipSource, Part, split_indices
from trainer.engine.pipeline import Pipeline
from trainer.evaluate import accuracy, torch_logits
from trainer.finetune import FinetuneConfig, arm_rates, finetune
from trainer.finetune_stage import FinetuneStage
from trainer.metrics import read_metrics
from trainer.model import ClipEncoder, EncoderConfig, load_encoder
from trainer.run import open_run

CPU = torch.device("cpu")
SMALL = EncoderConfig(width=8, depth=1, heads=1)


@pytest.fixture(scope="module")
def report(finished_runs):
    return Results.load(finished_runs / "results.json").find("finetune.0002.0000", "finetune")


def weights(module):
    return copy.deepcopy(module.state_dict())


def moved(before, after):
    return [name for name, value in after.items() if not torch.equal(value, before[name])]


def record_training(pool, arm, config):
    """Run the real loop; return for each step what was applied and what had moved."""
    torch.manual_seed(0)
    model = Classifier(ClipEncoder(SMALL), pool.classes)
    rows = split_indices(pool, Part.TRAIN)[::4]
    source = ClipSource(
        pool, rows, batch_size=config.batch_size, epochs=config.epochs, seed=config.seed
    )
    rates = arm_rates(config, arm, source.steps_per_epoch)
    stage = FinetuneStage(model, pool.class_ids, rates, weight_decay=0.05, device=CPU)
    seen, before = [], [weights(model.encoder), weights(model.head)]

    def record(item):
        after = [weights(model.encoder), weights(model.head)]
        applied = {group["name"]: group["lr"] for group in stage.optimiser.param_groups}
        seen.append(
            {
                "rates": applied,
                "encoder_moved": moved(before[0], after[0]),
                "head_moved": moved(before[1], after[1]),
                "encoder_training": model.encoder.training,
                "payload": item.payload,
            }
        )
        before[:] = after

    Pipeline(source, [stage], after_step=[record]).run()
    return seen, source.steps_per_epoch


def test_in_lp_ft_the_encoder_rests_through_the_probe_and_moves_at_every_step_after(pool):
    config = FinetuneConfig(epochs=5, probe_epochs=2)
    steps, per_epoch = record_training(pool, Arm.LP_FT, config)
    probe, tune = steps[: 2 * per_epoch], steps[2 * per_epoch :]
    assert len(tune) == 3 * per_epoch
    for step in probe:
        assert step["rates"]["encoder"] == 0
        assert not step["encoder_moved"]
        assert not step["encoder_training"]
        assert step["rates"]["head"] > 0
        assert "weight" in step["head_moved"]
    for step in tune:
        assert step["rates"]["encoder"] > 0
        assert "embed.weight" in step["encoder_moved"]
        assert step["encoder_training"]
    assert max(step["rates"]["encoder"] for step in tune) == config.rate


def test_in_full_the_encoders_rate_is_positive_at_every_step(pool):
    steps, per_epoch = record_training(pool, Arm.FULL, FinetuneConfig(epochs=3, probe_epochs=2))
    assert len(steps) == 3 * per_epoch
    assert all(step["rates"]["encoder"] > 0 for step in steps)
    # A head of zeros passes nothing back at the very first step.
    assert all("embed.weight" in step["encoder_moved"] for step in steps[1:])


def test_the_recorded_rates_are_the_applied_ones_and_those_of_the_schedule(pool):
    config = FinetuneConfig(epochs=3, probe_epochs=1)
    steps, per_epoch = record_training(pool, Arm.LP_FT, config)
    rates = arm_rates(config, Arm.LP_FT, per_epoch)
    for at, step in enumerate(steps):
        assert step["payload"]["train/rate_encoder"] == rates(at).encoder
        assert step["rates"] == {"encoder": rates(at).encoder, "head": rates(at).head}


def test_each_arm_is_a_run_with_an_id_checkpoints_metrics_and_weights_of_its_own(
    report, finished_runs
):
    assert set(report.arms) == {"full", "lp-ft"}
    for name, arm in report.arms.items():
        assert arm.run_id == f"finetune.0002.0000.{name}"
        assert arm.config["arm"] == name
        assert arm.inputs == {"pretrain": "pretrain.0001.0000"}
        assert arm.artifacts["classifier"].path == f"{name}/classifier.safetensors"
        folder = finished_runs / "artifacts" / "finetune.0002.0000" / name
        assert (folder / "metrics.jsonl").is_file()
        assert list((folder / "tensorboard").iterdir())
        checkpoints = finished_runs / "store" / "checkpoints" / "finetune.0002.0000" / name
        assert list(checkpoints.glob("*.pt"))
    found = Results.load(finished_runs / "results.json").find(
        "finetune.0002.0000.lp-ft", "finetune"
    )
    assert found == report.arms["lp-ft"]


def test_every_step_of_a_recorded_run_has_the_rates_of_its_phase(report, finished_runs):
    for name, arm in report.arms.items():
        path = finished_runs / "artifacts" / "finetune.0002.0000" / arm.artifacts["metrics"].path
        records = [r for r in read_metrics(path) if "train/rate_encoder" in r]
        per_epoch = len(records) // 30
        probe = 2 * per_epoch if name == "lp-ft" else 0
        assert [r["step"] for r in records] == list(range(1, 30 * per_epoch + 1))
        assert all(r["train/rate_encoder"] == 0 for r in records[:probe])
        assert all(r["train/rate_encoder"] > 0 for r in records[probe:])


def test_the_best_epoch_by_validation_is_what_is_kept(report, finished_runs, pool):
    arm = report.arms["lp-ft"]
    folder = finished_runs / "artifacts" / "finetune.0002.0000"
    records = read_metrics(folder / arm.artifacts["metrics"].path)
    history = [r["validation/accuracy"] for r in records if "validation/accuracy" in r]
    assert arm.metrics["validation_accuracy"] == max(history)
    assert history[int(arm.metrics["best_epoch"])] == max(history)
    model, meta = load_classifier(folder / arm.artifacts["classifier"].path)
    rows = split_indices(pool, Part.VALIDATION)
    logits = torch_logits(model, pool.clips(rows))
    assert accuracy(logits, pool.class_ids[rows]) == max(history)
    assert meta["run_id"] == arm.run_id


def test_the_metrics_of_the_run_are_those_of_its_best_arm(report):
    best = max(report.arms.values(), key=lambda arm: arm.metrics["validation_accuracy"])
    assert report.metrics == best.metrics
    assert {f"validation_accuracy/{c}" for c in ("GunPoint", "ACSF1")} < set(report.metrics)


def test_a_run_killed_in_its_second_arm_resumes_as_if_it_had_not_been(runs, pool_path):
    settings = ["--epochs", "12", "--probe-epochs", "2", "--checkpoint-every", "2"]
    command = [sys.executable, "-m", "trainer", "finetune", "--pool", str(pool_path)]
    command += [*settings, "--threads", "1", "--output", str(runs), "--run-id"]
    config = FinetuneConfig(
        pool=pool_path, epochs=12, probe_epochs=2, checkpoint_every=2, threads=1
    )
    killed = "finetune.0101.0000"
    checkpoints = runs / "store" / "checkpoints" / killed / "lp-ft"
    process = subprocess.Popen([*command, killed], stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 120
        while not list(checkpoints.glob("*.json")):
            assert time.monotonic() < deadline
            with pytest.raises(subprocess.TimeoutExpired):  # that is, it is still running
                process.wait(timeout=0.02)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    reports = {}
    for run_id in (killed, "finetune.0102.0000"):
        with open_run("finetune", output=runs, run_id=run_id, environ={}) as run:
            reports[run_id] = finetune(config, run)
    resumed, whole = reports.values()
    assert resumed.arms["full"].detail["resumed_from"] > 0
    assert resumed.arms["lp-ft"].detail["resumed_from"] > 0
    assert resumed.metrics == whole.metrics
    for name in ("full", "lp-ft"):
        models = [
            load_classifier(runs / "artifacts" / r / name / "classifier.safetensors")[0]
            for r in reports
        ]
        assert not moved(models[0].state_dict(), models[1].state_dict())
        curves = [
            [
                {k: v for k, v in record.items() if k != "time"}
                for record in read_metrics(runs / "artifacts" / r / name / "metrics.jsonl")
            ]
            for r in reports
        ]
        assert curves[0] == curves[1]


def test_only_the_arms_that_are_named_are_run():
    assert FinetuneConfig().arms == (Arm.FULL, Arm.LP_FT)
    assert FinetuneConfig(arm=(Arm.LP_FT, Arm.LP_FT)).arms == (Arm.LP_FT,)
    assert FinetuneConfig(arm=(Arm.LP_FT, Arm.FULL)).arms == (Arm.FULL, Arm.LP_FT)


def test_fine_tuning_can_start_from_the_champions_encoder(runs, pool_path):
    ship = runs / "artifacts" / "export.0002.0000" / "export.0002.0000.ship"
    bundle = open_bundle(ship)
    promote(runs / "store", bundle, against="", now=0.0)
    with open_run("finetune", output=runs, environ={}) as run:
        base = load_base(Base.CHAMPION, run, length=128, seed=0)
        config = FinetuneConfig(
            pool=pool_path, base=Base.CHAMPION, arm=(Arm.LP_FT,), epochs=2, probe_epochs=1
        )
        report = finetune(config, run)
    shipped = runs / "base.safetensors"
    shipped.write_bytes(bundle.read(BASE))
    assert not moved(load_encoder(shipped)[0].state_dict(), base.encoder.state_dict())
    assert report.inputs == report.arms["lp-ft"].inputs == {"export": "export.0002.0000"}


def test_without_champion_there_is_nothing_to_start_from(runs):
    with (
        open_run("finetune", output=runs, environ={}) as run,
        pytest.raises(UsageError, match="no champion yet"),
    ):
        load_base(Base.CHAMPION, run, length=128, seed=0)


def test_an_untrained_base_is_a_function_of_the_seed(runs):
    run = open_run("finetune", output=runs, environ={})
    first, same, other = (
        load_base(Base.SCRATCH, run, length=128, seed=seed).encoder.state_dict()
        for seed in (1, 1, 2)
    )
    assert not moved(first, same)
    assert moved(first, other)


def test_an_encoder_of_another_length_is_refused(runs):
    with (
        open_run("finetune", output=runs, environ={}) as run,
        pytest.raises(UsageError, match="length is 128; it must be 64"),
    ):
        load_base(Base.PRETRAIN, run, length=64, seed=0)


def test_an_altered_encoder_is_refused(runs, pool_path):
    path = runs / "artifacts" / "pretrain.0001.0000" / "encoder.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with (
        open_run("finetune", output=runs, environ={}) as run,
        pytest.raises(DataError, match="SHA-256"),
    ):
        finetune(FinetuneConfig(pool=pool_path), run)


def test_a_loss_that_is_not_a_number_names_the_step_and_its_clips(pool):
    model = Classifier(ClipEncoder(SMALL), pool.classes)
    with torch.no_grad():
        model.head.bias[0] = float("nan")
    config = FinetuneConfig(epochs=2, probe_epochs=1)
    source = ClipSource(pool, np.arange(8), batch_size=8, epochs=1, seed=0)
    rates = arm_rates(config, Arm.FULL, source.steps_per_epoch)
    stage = FinetuneStage(model, pool.class_ids, rates, weight_decay=0.0, device=CPU)
    with pytest.raises(Exception, match=r"'train' failed on item 0 .*ACSF1"):
        Pipeline(source, [stage]).run()


@pytest.mark.parametrize(
    "settings",
    [
        {"epochs": 0},
        {"probe_epochs": 40},
        {"probe_epochs": 0},
        {"rate": 0.0},
        {"probe_rate": -1.0},
        {"arm": ()},
        {"warmup": 1.5},
        {"validation": 0.0},
        {"weight_decay": -0.1},
        {"threads": 0},
        {"batch_size": 0},
    ],
)
def test_a_setting_out_of_range_is_refused_by_name(settings):
    with pytest.raises(UsageError, match=next(iter(settings))):
        FinetuneConfig(**settings)


def test_a_report_is_plain_json(report):
    json.dumps(report.to_json(), allow_nan=False)
