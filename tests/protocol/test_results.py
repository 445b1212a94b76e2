import dataclasses
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import DataError
from protocol.messages import RunEnded, decode_messages, encode_messages
from protocol.results import (
    MAX_REPORT_BYTES,
    MAX_REPORT_DEPTH,
    Artifact,
    Results,
    RunRecord,
    StageReport,
    read_report,
)
from protocol.states import Result

RUN = "finetune.0002.7f3a"
ARM = StageReport(run_id=f"{RUN}.lp-ft", stage="finetune", metrics={"accuracy": 0.9})
REPORT = StageReport(
    run_id=RUN,
    stage="finetune",
    metrics={"accuracy": 0.8},
    data_hash="d" * 64,
    seed=3,
    config={"lr": 1e-3, "layers": [1, 2]},
    durations={"train": 1.5},
    artifacts={"encoder": Artifact(path="encoder.safetensors", size=10, sha256="a" * 64)},
    inputs={"pretrain": "pretrain.0001.7f3a"},
    arms={"lp-ft": ARM},
)
RECORD = RunRecord(
    run_id=RUN,
    stage="finetune",
    line="run:finetune",
    result=Result.SUCCESS,
    attempts=1,
    started=1.0,
    ended=2.0,
    snapshot=1,
    after={"pretrain": "pretrain.0001.7f3a"},
    report=REPORT,
)


def saved(folder: Path, *runs: RunRecord) -> Path:
    path = folder / "results.json"
    Results(runs).save(path)
    return path


def test_results_are_read_back_as_they_were_written(tmp_path: Path):
    failed = RunRecord(run_id="gate.0003.7f3a", stage="gate", line="run:gate", result=Result.LOST)
    loaded = Results.load(saved(tmp_path, RECORD, failed))
    assert loaded.runs == {RUN: RECORD, "gate.0003.7f3a": failed}


def test_no_file_is_no_results(tmp_path: Path):
    assert Results.load(tmp_path / "results.json").runs == {}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"accuracy": 0.8', '"accuracy": 0.99'),
        ('"result": "success"', '"result": "failed"'),
        ('"finetune.0002.7f3a": {', '"finetune.0009.7f3a": {'),
        ('"version": 1', '"version": 2'),
        ('"attempts": 1', '"attempts": "many"'),
        ('"seed": 3', '"seed": NaN'),
    ],
)
def test_a_file_that_was_edited_by_hand_is_noticed(tmp_path: Path, old: str, new: str):
    path = saved(tmp_path, RECORD)
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    with pytest.raises(DataError, match=r"results\.json"):
        Results.load(path)


@given(data=st.binary(max_size=60) | st.integers(0, 500))
def test_a_torn_or_foreign_file_is_a_data_error(tmp_path: Path, data: bytes | int):
    path = saved(tmp_path, RECORD)
    path.write_bytes(path.read_bytes()[:data] if isinstance(data, int) else data)
    with pytest.raises(DataError, match=r"results\.json"):
        Results.load(path)


def test_layout_and_order_of_keys_do_not_matter_to_the_digest(tmp_path: Path):
    path = saved(tmp_path, RECORD)
    path.write_text(json.dumps(json.loads(path.read_text()), sort_keys=True))
    assert Results.load(path).runs == {RUN: RECORD}


def test_a_result_is_found_by_run_id_and_canonical_stage():
    results = Results([RECORD])
    assert results.find(RUN, "Finetune") == REPORT
    assert results.find(f"{RUN}.lp-ft", "finetune") == ARM


@pytest.mark.parametrize(
    ("run_id", "stage", "why"),
    [
        ("finetune.0009.7f3a", "finetune", "no such run"),
        ("finetune.0002.ffff", "finetune", "no such run"),
        (RUN, "pretrain", "of stage 'finetune'"),
        (f"{RUN}.full", "finetune", "left no report"),
        ("gate.0003.7f3a", "gate", "ended as failed: exit 2"),
        ("export.0004.7f3a", "export", "left no report"),
    ],
)
def test_a_stale_or_foreign_result_is_an_error(run_id: str, stage: str, why: str):
    failed = RunRecord(
        run_id="gate.0003.7f3a", stage="gate", line="", result=Result.FAILED, cause="exit 2"
    )
    mute = RunRecord(run_id="export.0004.7f3a", stage="export", line="", result=Result.SUCCESS)
    with pytest.raises(DataError, match=why):
        Results([RECORD, failed, mute]).find(run_id, stage)


def write(folder: Path, value: object) -> Path:
    path = folder / "report.json"
    path.write_bytes(value if isinstance(value, bytes) else json.dumps(value).encode())
    return path


def test_a_report_is_read_back_as_it_was_written(tmp_path: Path):
    path = write(tmp_path, REPORT.to_json())
    assert read_report(path, run_id=RUN, stage="finetune") == REPORT


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"{",
        b"[" * 100_000,
        b" " * (MAX_REPORT_BYTES + 1),
        {},
        {"run_id": RUN, "stage": "Finetune"},
        {"run_id": "pretrain.0001.7f3a", "stage": "finetune"},
        {"run_id": "nonsense", "stage": "finetune"},
        {"run_id": RUN, "stage": "finetune", "metrics": {"loss": float("nan")}},
        {"run_id": RUN, "stage": "finetune", "detail": {"loss": float("inf")}},
        {"run_id": RUN, "stage": "finetune", "metrics": {"loss": 10**400}},
        {"run_id": RUN, "stage": "finetune", "detail": {"text": "\ud800"}},
        {"run_id": RUN, "stage": "finetune", "arms": {"full": ARM.to_json()}},
        {"run_id": "finetune.0001.7f3a", "stage": "finetune"},
    ],
)
def test_an_unusable_report_is_a_data_error(tmp_path: Path, value: object):
    with pytest.raises(DataError, match=r"report\.json"):
        read_report(write(tmp_path, value), run_id=RUN, stage="finetune")


def test_a_missing_report_is_a_data_error(tmp_path: Path):
    with pytest.raises(DataError, match="No such file"):
        read_report(tmp_path / "report.json", run_id=RUN, stage="finetune")


NESTED = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
)


@given(detail=st.dictionaries(st.text(max_size=5), NESTED))
def test_a_report_that_is_accepted_can_be_published(tmp_path: Path, detail: dict[str, object]):
    path = write(tmp_path, {"run_id": RUN, "stage": "finetune", "detail": detail})
    try:
        report = read_report(path, run_id=RUN, stage="finetune")
    except DataError:
        return
    record = dataclasses.replace(RECORD, report=report)
    assert Results.load(saved(tmp_path, record)).runs == {RUN: record}


def nested(levels: int) -> dict[str, object]:
    """A report of this many levels in all."""
    detail: object = {}
    for _ in range(levels - 2):
        detail = {"a": detail}
    return {"run_id": RUN, "stage": "finetune", "detail": detail}


def test_a_report_of_the_greatest_depth_can_be_published_and_sent(tmp_path: Path):
    report = read_report(write(tmp_path, nested(MAX_REPORT_DEPTH)), run_id=RUN, stage="finetune")
    record = dataclasses.replace(RECORD, report=report)
    assert Results.load(saved(tmp_path, record)).runs == {RUN: record}
    assert decode_messages(encode_messages([RunEnded(record=record)])) == [RunEnded(record=record)]
    with pytest.raises(DataError, match="deep"):
        read_report(write(tmp_path, nested(MAX_REPORT_DEPTH + 1)), run_id=RUN, stage="finetune")


def test_a_cause_with_a_file_name_in_another_encoding_is_kept(tmp_path: Path):
    record = dataclasses.replace(RECORD, cause="cannot read caf\udce9")
    loaded = Results.load(saved(tmp_path, record)).runs[RUN]
    assert loaded == dataclasses.replace(record, cause="cannot read caf?")
