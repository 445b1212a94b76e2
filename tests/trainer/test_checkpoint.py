"""Tests of trainer/checkpoint.py."""

from __future__ import annotations

import json
import resource
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from protocol.errors import DataError
from trainer import checkpoint


def state(value: float) -> dict[str, object]:
    return {"weights": {"w": torch.full((64, 64), value)}, "step": 3, "name": "x", "list": [1.5]}


def test_a_checkpoint_comes_back_as_it_was(tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path, 30, state(0.25), score=0.5)
    found = checkpoint.newest_valid(tmp_path)
    assert found is not None
    assert found[0] == path
    assert torch.equal(found[1]["weights"]["w"], torch.full((64, 64), 0.25))
    assert {k: found[1][k] for k in ("step", "name", "list")} == {
        "step": 3,
        "name": "x",
        "list": [1.5],
    }


def test_without_a_checkpoint_there_is_none(tmp_path: Path) -> None:
    assert checkpoint.newest_valid(tmp_path) is None
    assert checkpoint.newest_valid(tmp_path / "nowhere") is None


def truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def altered(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


def manifest_torn(path: Path) -> None:
    manifest = path.with_suffix(".json")
    manifest.write_text(manifest.read_text()[:20])


def of_a_newer_version(path: Path) -> None:
    manifest = path.with_suffix(".json")
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "version": 99}))


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (truncated, "cut short"),
        (altered, "SHA-256"),
        (manifest_torn, "Unterminated|Expecting"),
        (of_a_newer_version, "version 99"),
        (Path.unlink, "No such file"),
    ],
)
def test_a_damaged_checkpoint_is_passed_over_with_a_warning(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    damage: Callable[[Path], None],
    why: str,
) -> None:
    good = checkpoint.save(tmp_path, 10, state(1.0))
    damage(checkpoint.save(tmp_path, 20, state(2.0)))
    found = checkpoint.newest_valid(tmp_path)
    assert found is not None
    assert found[0] == good
    said = capsys.readouterr().err
    assert "trainer: warning: passed over the checkpoint" in said
    assert any(part in said for part in why.split("|"))


def test_a_disk_that_is_full_is_named_and_costs_no_earlier_checkpoint(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, 1, state(1.0))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8 * 1024, limits[1]))
    try:
        with pytest.raises(DataError, match=r"write the checkpoint: .*02\.pt: File too large"):
            checkpoint.save(tmp_path, 2, state(2.0))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    found = checkpoint.newest_valid(tmp_path)
    assert found is not None
    assert found[0].name == "checkpoint-00000001.pt"
    assert len(list(tmp_path.iterdir())) == 2


def test_data_without_its_manifest_is_no_checkpoint(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, 10, state(1.0)).with_suffix(".json").unlink()
    assert checkpoint.newest_valid(tmp_path) is None


def test_a_pickle_that_would_run_code_is_not_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Trap:
        def __reduce__(self) -> tuple[Callable[[str], object], tuple[str]]:
            return Path.touch, (tmp_path / "trapped",)  # type: ignore[return-value]

    checkpoint.save(tmp_path, 1, {"trap": Trap()})
    assert checkpoint.newest_valid(tmp_path) is None
    assert not (tmp_path / "trapped").exists()
    assert "passed over" in capsys.readouterr().err


def steps(directory: Path) -> set[int]:
    return {int(path.stem.split("-")[1]) for path in directory.glob("checkpoint-*.pt")}


def test_pruning_keeps_the_newest_and_the_best(tmp_path: Path) -> None:
    for step, score in ((1, 0.1), (2, 0.9), (3, 0.2), (4, 0.3), (5, 0.25)):
        checkpoint.save(tmp_path, step, state(step), score=score)
    removed = checkpoint.prune(tmp_path, keep_last=2, keep_best=1)
    assert steps(tmp_path) == {2, 4, 5}
    assert {path.name for path in removed} == {"checkpoint-00000001.pt", "checkpoint-00000003.pt"}
    assert len(list(tmp_path.iterdir())) == 6


def test_pruning_clears_what_a_crash_left(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, 1, state(1.0))
    checkpoint.save(tmp_path, 2, state(2.0)).with_suffix(".json").unlink()
    (tmp_path / ".checkpoint-00000003.pt.abc.tmp").write_bytes(b"half")
    checkpoint.prune(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "checkpoint-00000001.json",
        "checkpoint-00000001.pt",
    ]


def test_another_configuration_is_refused_naming_each_differing_field(tmp_path: Path) -> None:
    saved = {"width": 64, "seed": 1, "threads": 1, "rate": 0.1}
    current = {"width": 32, "seed": 1, "threads": 2, "depth": 3, "rate": 0.1}
    with pytest.raises(DataError) as caught:
        checkpoint.check_config(saved, current, path=tmp_path / "c.pt", ignore={"threads"})
    assert "depth was None, is 3; width was 64, is 32" in str(caught.value)
    assert "threads" not in str(caught.value)
    checkpoint.check_config(saved, saved, path=tmp_path / "c.pt")
