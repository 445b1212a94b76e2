"""Power cuts in the middle of an attempt: what may have run is on record, and so is how it ended.

`tests/support/powercut.py` says what a power cut may leave of the attempt's files.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import pytest
from powercut import Recording
from powercut_scenarios import (
    Scenario,
    assert_kept,
    assert_kept_after_kills,
    assert_needed,
    each_sync,
)

from syncd.stages import attempt
from syncd.stages.attempt import Ended, attempt_dir, observe, prepare, request_stop, was_started
from syncd.stages.attempt_files import (
    EXIT,
    STAGE,
    AttemptSpec,
    StageStart,
    read_file,
    read_spec,
    stop_requested,
)
from syncd.stages.causes import StopReason

# Attempts

RUN_ID = "hello.0001.7f3a"


def spec_at(root):
    return AttemptSpec(
        run_id=RUN_ID,
        stage="hello",
        attempt=1,
        line="run:hello",
        command="echo 'the stage' ran",
        cwd=str(root),
        log=str(root / "in" / "hello.log"),
    )


def prepare_and_stop(root, done):
    folder = prepare(root / "runs" / RUN_ID, spec_at(root))
    done("prepared")
    request_stop(folder, StopReason.TERMINATED)
    done("stopped")


def check_prepared(root, done):
    folder = attempt_dir(root / "runs" / RUN_ID, 1)
    if "stopped" in done or (folder / "stop.json").exists():
        assert stop_requested(folder) is StopReason.TERMINATED
    if "prepared" not in done:
        prepare(folder.parent, spec_at(root))
    assert read_spec(folder).stage == "hello"


SUPERVISE = """
import pickle, sys
from pathlib import Path
from powercut_recorder import Recorder
from syncd.stages import supervisor
root, folder, target = map(Path, sys.argv[1:])
with Recorder(root) as recorder:
    (root / "in").mkdir(exist_ok=True)  # as one leaves it that was killed while it made folders
    assert supervisor.main([str(folder)]) == 0
    recorder.done("recorded")
target.write_bytes(pickle.dumps(recorder.recording))
"""


class Supervised(Scenario):
    """Recorded is a real supervisor, in its own process, with a real stage."""

    def record(self, root: Path) -> Recording:
        root.mkdir()
        self.start(root)
        target = root.with_suffix(".pickle")
        support = str(Path(__file__).parents[2] / "support")
        subprocess.run(
            [sys.executable, "-c", SUPERVISE, root, attempt_dir(root / "runs" / RUN_ID, 1), target],
            env={**os.environ, "PYTHONPATH": support},
            check=True,
        )
        recording = pickle.loads(target.read_bytes())
        assert isinstance(recording, Recording)
        return recording


def prepared(root):
    prepare(root / "runs" / RUN_ID, spec_at(root))


def check_supervised(root, done):
    folder = attempt_dir(root / "runs" / RUN_ID, 1)
    log = root / "in" / "hello.log"
    text = log.read_bytes() if log.exists() else b""
    with patch.object(attempt, "remains", return_value=[]):  # nothing outlives a power cut
        seen = observe(folder)
    assert not done or isinstance(seen, Ended)
    if b"the stage ran" in text:
        assert read_file(folder / STAGE, StageStart)
    if (folder / STAGE).exists():
        assert was_started(seen)
    if (folder / EXIT).exists():
        assert isinstance(seen, Ended)
        assert seen.record.exit_code == 0
        assert b"the stage ran\n" in text
        assert text.endswith(seen.record.log_end().line())


SCENARIOS = [
    Scenario(
        name="attempt prepared",
        act=prepare_and_stop,
        check=check_prepared,
        syncs=[
            "./ by prepare, make_dirs",
            "runs by prepare, make_dirs",
            "runs/hello.0001.7f3a by prepare, make_dirs",
            "runs/hello.0001.7f3a/attempt-1/.spec.json.tmp by prepare, publish_json",
            "runs/hello.0001.7f3a/attempt-1 by prepare, publish_json",
            "runs/hello.0001.7f3a/attempt-1/.stop.json.tmp by request_stop, publish_json",
            "runs/hello.0001.7f3a/attempt-1 by request_stop, publish_json",
        ],
    ),
]
SUPERVISED = [
    Supervised(
        name="attempt supervised",
        start=prepared,
        act=lambda root, done: None,
        check=check_supervised,
        syncs=[
            "runs/hello.0001.7f3a/attempt-1/.supervisor.json.tmp by main, publish_json",
            "runs/hello.0001.7f3a/attempt-1 by main, publish_json",
            "./ by LogFile.__init__, make_dirs",
            "in by LogFile.__init__, fsync_dir",
            "runs/hello.0001.7f3a/attempt-1/.stage.json.tmp by _Tree.start, publish_json",
            "runs/hello.0001.7f3a/attempt-1 by _Tree.start, publish_json",
            "in/hello.log by LogFile.close",
            "runs/hello.0001.7f3a/attempt-1/.exit.json.tmp by record_end, publish_json",
            "runs/hello.0001.7f3a/attempt-1 by record_end, publish_json",
        ],
    ),
]
ALL = [*SCENARIOS, *SUPERVISED]


@pytest.mark.parametrize("scenario", ALL, ids=str)
def test_a_power_cut_at_any_moment_breaks_no_promise(scenario, tmp_path):
    assert_kept(scenario, tmp_path)


@each_sync(ALL)
def test_without_this_sync_some_power_cut_breaks_a_promise(scenario, sync, tmp_path):
    assert_needed(scenario, sync, tmp_path)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=str)
def test_a_kill_and_a_restart_before_the_power_cut_break_no_promise(scenario, tmp_path):
    assert_kept_after_kills(scenario, tmp_path)
