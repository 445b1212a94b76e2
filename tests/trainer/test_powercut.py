"""Power cuts while checkpoints are saved and pruned: `tests/support/powercut.py` says how."""

from __future__ import annotations

import pytest
import torch
from powercut_scenarios import (
    Scenario,
    assert_kept,
    assert_kept_after_kills,
    assert_needed,
    each_sync,
)

from trainer import checkpoint
from trainer.hashing import file_sha256


def save_and_prune(root, done):
    for step in (1, 2):
        checkpoint.save(root, step, {"w": torch.full((8,), float(step))})
        done(str(step))
    checkpoint.prune(root, keep_last=1)


def check_checkpoints(root, done):
    """The newest that was saved is there, and no manifest is without its data."""
    for path in root.glob("checkpoint-*.json"):
        manifest = checkpoint.read_manifest(path)
        assert file_sha256(path.with_suffix(".pt")) == manifest.sha256
    found = checkpoint.newest_valid(root)
    newest = int(found[1]["w"][0]) if found else 0
    assert newest >= (int(done[-1]) if done else 0)


SCENARIOS = [
    Scenario(
        name="checkpoints saved",
        act=save_and_prune,
        check=check_checkpoints,
        syncs=[
            ".checkpoint-00000001.pt.tmp by save, publishing",
            "./ by save, publishing",
            ".checkpoint-00000001.json.tmp by save, publish_json",
            "./ by save, publish_json",
            ".checkpoint-00000002.pt.tmp by save, publishing",
            ".checkpoint-00000002.json.tmp by save, publish_json",
            "./ by prune, fsync_dir",
        ],
    ),
]


@pytest.mark.parametrize("scenario", SCENARIOS, ids=str)
def test_a_power_cut_at_any_moment_breaks_no_promise(scenario, tmp_path):
    assert_kept(scenario, tmp_path)


@each_sync(SCENARIOS)
def test_without_this_sync_some_power_cut_breaks_a_promise(scenario, sync, tmp_path):
    assert_needed(scenario, sync, tmp_path)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=str)
def test_a_kill_and_a_restart_before_the_power_cut_break_no_promise(scenario, tmp_path):
    assert_kept_after_kills(scenario, tmp_path)
