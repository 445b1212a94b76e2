"""Stage `export`: the best fine-tuned arm as an ONNX model, proven equal, in a ship bundle.

    <artifact dir>/model.onnx             clips (batch, length) float32 -> logits (batch, classes)
    <artifact dir>/encoder.safetensors    its encoder, without the head
    <artifact dir>/<run id>.ship          both, with what there is to know of them

The ONNX graph z-normalises each clip itself; resampling to the model's length is left to whoever
calls it, as the bundle's manifest says.
"""

from __future__ import annotations

import contextlib
import io
import logging
import time
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from torch import Tensor, nn

from protocol.errors import DataError, UsageError
from protocol.names import RunId
from protocol.publish import publish_bytes
from protocol.results import StageReport
from trainer.arms import best_arm, canonical_arm
from trainer.bundle import BASE, MODEL, Manifest, write_bundle
from trainer.classifier import Classifier, load_classifier
from trainer.config import as_json, require_threads
from trainer.data import Part, split_indices
from trainer.devices import set_up_torch
from trainer.evaluate import Clips, onnx_logits, onnx_session, torch_logits
from trainer.files import writing
from trainer.hashing import code_hash
from trainer.model import save_encoder
from trainer.pool.format import Pool, Rows, open_pool
from trainer.run import Run

ENCODER = "encoder.safetensors"
OPSET = 20
PARITY_BATCHES = (1, 7, 64)
PARITY_LIMIT = 1e-4
PARITY_CLIPS = 256
EPSILON = 1e-6


@dataclass(frozen=True, kw_only=True)
class ExportConfig:
    """What to export, and the clips to prove it on."""

    pool: Path = Path("pool")
    """Folder of the pool that was trained on; parity is checked on its held-out clips."""

    arm: str | None = None
    """Fine-tuning arm to export; by default the best one by validation."""

    from_run: str | None = None
    """The fine-tuning run to export from; by default the newest one."""

    threads: int = 1
    """CPU threads of torch and onnxruntime."""

    def __post_init__(self) -> None:
        require_threads("export", self.threads)


class ShippedModel(nn.Module):
    """Clips (B, T) float32 of any scale to logits (B, C): z-normalisation, then the classifier.

    A clip without variation becomes zeros, as in the pool.
    """

    def __init__(self, classifier: Classifier) -> None:
        super().__init__()
        self.classifier = classifier

    def forward(self, clips: Tensor) -> Tensor:
        centred = clips - clips.mean(dim=1, keepdim=True)
        deviation = centred.square().mean(dim=1, keepdim=True).sqrt()
        logits: Tensor = self.classifier(centred / deviation.clamp_min(EPSILON))
        return logits


def export(config: ExportConfig, run: Run) -> StageReport:
    """Export the chosen arm; return the report of a run that proved its parity.

    Raises DataError when an artefact is not the one that was reported, when the pool is not the
    one trained on, or when ONNX and torch differ by more than 1e-4 on held-out clips.
    """
    set_up_torch(device="cpu", threads=config.threads)
    durations: dict[str, float] = {}
    pool = open_pool(config.pool)
    tuned = find_arm(run, arm=config.arm, from_run=config.from_run)
    check_data(pool.content_hash, tuned.data_hash, pool.folder, of=f"run {tuned.run_id}")
    classifier, _ = load_classifier(run.input_artifact("finetune", tuned.run_id, "classifier"))
    shipped = ShippedModel(classifier).eval()
    onnx_path = run.artifact_dir / MODEL
    with timed(durations, "export"):
        run.progress(0, 3, "step", f"exporting {tuned.run_id}")
        model = to_onnx(shipped, classifier.encoder.config.length)
        with writing("write the model", onnx_path):
            publish_bytes(onnx_path, model)
    with timed(durations, "parity"):
        run.progress(1, 3, "step", "comparing with torch")
        clips = pool.clips(_spread(split_indices(pool, Part.TEST), PARITY_CLIPS))
        difference = check_parity(shipped, onnx_path, clips, threads=config.threads)
    with timed(durations, "bundle"):
        run.progress(2, 3, "step", "writing the bundle")
        metrics = {**tuned.metrics, "parity_max_abs_difference": difference}
        manifest = _write_bundle(config, run, pool, tuned, classifier, metrics)
    run.progress(3, 3, "step", "exported")
    return StageReport(
        run_id=run.run_id,
        stage=run.stage,
        metrics=metrics,
        data_hash=manifest.data_hash,
        code_hash=manifest.code_hash,
        config=manifest.config["export"],
        seed=tuned.seed,
        durations=durations,
        artifacts={
            "model": run.artifact(MODEL),
            "encoder": run.artifact(ENCODER),
            "bundle": run.artifact(bundle_name(run.run_id)),
        },
        inputs=manifest.inputs,
        detail={"arm": manifest.arm, "opset": OPSET, "parity_clips": len(clips)},
    )


def find_arm(run: Run, *, arm: str | None = None, from_run: str | None = None) -> StageReport:
    """Return the report of the arm to export: the one named, else the best by validation.

    A run id with an arm names the arm too. Raises UsageError when the run has no such arm, or two
    are named.
    """
    run_id = RunId.parse(run.input_run("finetune", from_run))
    whole = str(replace(run_id, arm=""))
    arms = run.input_report("finetune", whole).arms
    named = {name for name in (canonical_arm(arm or ""), run_id.arm) if name}
    if not named:
        return best_arm(arms)
    if len(named) > 1 or not named <= set(arms):
        raise UsageError(
            f"export the arm {' and '.join(sorted(map(repr, named)))}",
            why=f"run {whole} has the arms {', '.join(sorted(arms))}",
            hint="Name one of them, or none for the best by validation.",
        )
    return arms[named.pop()]


def check_data(found: str, expected: str, path: Path, *, of: str) -> None:
    """Raise DataError unless the pool at `path` is the one that `of` was made with."""
    if found != expected:
        raise DataError(
            "use the pool",
            path=path,
            why=f"its content hash is {found[:12]}, that of {of} {expected[:12]}",
            hint="Pass the pool that it was trained on, or run the stages anew.",
        )


def to_onnx(model: ShippedModel, length: int) -> bytes:
    """Return the model as checked ONNX with a dynamic batch.

    What the exporter notes of our source (paths, lines) is left out, so that one model makes the
    same bytes on every machine.
    """
    example = torch.zeros(2, length)
    with _quiet_exporter():
        program = torch.onnx.export(
            model,
            (example,),
            dynamo=True,
            opset_version=OPSET,
            input_names=["clips"],
            output_names=["logits"],
            dynamic_shapes=({0: torch.export.Dim("batch")},),
        )
    if program is None:
        raise RuntimeError("torch.onnx.export made no program")
    proto = program.model_proto
    for part in (proto, proto.graph, *proto.graph.node, *proto.graph.value_info):
        part.ClearField("metadata_props")
        part.ClearField("doc_string")
    onnx.checker.check_model(proto, full_check=True)
    data: bytes = proto.SerializeToString(deterministic=True)
    return data


@contextlib.contextmanager
def _quiet_exporter() -> Iterator[None]:
    """Keep what the exporter says of itself (progress, missing torchvision) out of the log."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def check_parity(model: ShippedModel, onnx_path: Path, clips: Clips, *, threads: int) -> float:
    """Return the largest absolute difference of the logits of torch and onnxruntime.

    Both see all `clips` in batches of 1, 7 and 64. Raises DataError when it is above 1e-4.
    """
    session = onnx_session(onnx_path.read_bytes(), threads=threads)
    differences = [
        np.abs(
            torch_logits(model, clips, batch_size=size)
            - onnx_logits(session, clips, batch_size=size)
        ).max()
        for size in PARITY_BATCHES
    ]
    # numpy's max keeps a NaN, as Python's does not; and so written, a NaN does not pass.
    difference = float(np.max(differences))
    if not difference <= PARITY_LIMIT:
        raise DataError(
            "export the model",
            path=onnx_path,
            why=f"its logits differ from torch's by {difference:.2g}; the limit is {PARITY_LIMIT}",
            hint="Do not ship it. Report the versions of torch and onnxruntime.",
        )
    return difference


def describe_preprocessing(pool: Pool, length: int) -> dict[str, Any]:
    """Return what a raw clip goes through: `caller` is left to whoever calls, `graph` is inside."""
    return {
        "length": length,
        "caller": f"resample to {length} values by linear interpolation",
        "graph": f"z-normalise: (clip - mean) / max(standard deviation, {EPSILON})",
        "pool": dict(pool.manifest.preprocessing),
    }


def bundle_name(run_id: str) -> str:
    return f"{run_id}.ship"


@contextlib.contextmanager
def timed(durations: dict[str, float], phase: str) -> Iterator[None]:
    """Record the seconds of the block as `durations[phase]`."""
    began = time.perf_counter()
    yield
    durations[phase] = time.perf_counter() - began


def _write_bundle(
    config: ExportConfig,
    run: Run,
    pool: Pool,
    tuned: StageReport,
    classifier: Classifier,
    metrics: Mapping[str, float],
) -> Manifest:
    arm = RunId.parse(tuned.run_id).arm
    encoder_path = run.artifact_dir / ENCODER
    save_encoder(encoder_path, classifier.encoder, {"run_id": run.run_id, "arm": arm})
    manifest = Manifest(
        run_id=run.run_id,
        stage=run.stage,
        arm=arm,
        inputs={**tuned.inputs, "finetune": tuned.run_id},
        preprocessing=describe_preprocessing(pool, classifier.encoder.config.length),
        config={"export": as_json(config), "finetune": tuned.config},
        classes=classifier.classes,
        metrics=metrics,
        data_hash=pool.content_hash,
        code_hash=code_hash(),
    )
    members = {MODEL: run.artifact_dir / MODEL, BASE: encoder_path}
    return write_bundle(run.artifact_dir / bundle_name(run.run_id), manifest, members).manifest


def _spread(rows: Rows, count: int) -> Rows:
    """Return at most `count` of `rows`, evenly spread over them, so over all corpora."""
    return rows[np.unique(np.linspace(0, len(rows) - 1, count).astype(np.int64))]
