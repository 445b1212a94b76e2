import subprocess
from pathlib import Path

import pytest

from protocol.errors import UsageError
from protocol.stage_env import StageEnvironment

ENVIRONMENT = StageEnvironment(
    run_id="finetune.0012.7f3a",
    stage="finetune",
    attempt=2,
    checkpoint_dir=Path("/s/store/checkpoints/finetune.0012.7f3a"),
    artifact_dir=Path("/s/in/artifacts/finetune.0012.7f3a"),
    result_file=Path("/s/.syncd/report.json"),
    progress_file=Path("/s/.syncd/progress.json"),
    store=Path("/s/store"),
    payload=Path("/s/.syncd/payload/000001-ab"),
    results=Path("/s/in/results.json"),
    after={"pretrain": "pretrain.0011.7f3a"},
)


def test_the_environment_is_read_back_as_it_was_set():
    assert StageEnvironment.from_environ(ENVIRONMENT.to_environ()) == ENVIRONMENT


def test_a_process_finds_the_variables(tmp_path: Path):
    environ = {**ENVIRONMENT.to_environ(), "PATH": "/usr/bin:/bin"}
    told = subprocess.run(["env"], env=environ, capture_output=True, check=True, text=True).stdout
    found = dict(line.split("=", 1) for line in told.splitlines() if line.startswith("SYNCD_"))
    assert StageEnvironment.from_environ(found) == ENVIRONMENT


def test_outside_of_a_runner_there_is_none():
    assert StageEnvironment.from_environ({}) is None
    assert StageEnvironment.from_environ({"SYNCD_RUN_ID": ""}) is None


@pytest.mark.parametrize("name", [n for n in ENVIRONMENT.to_environ() if n != "SYNCD_RUN_ID"])
def test_a_missing_variable_is_named(name: str):
    environ = ENVIRONMENT.to_environ()
    del environ[name]
    with pytest.raises(UsageError, match=f"{name} is not"):
        StageEnvironment.from_environ(environ)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("SYNCD_RUN_ID", "nonsense"),
        ("SYNCD_STAGE", "../x"),
        ("SYNCD_ATTEMPT", "one"),
        ("SYNCD_AFTER", "[]"),
        ("SYNCD_AFTER", "{"),
        ("SYNCD_AFTER", "[" * 100_000),
        ("SYNCD_AFTER", '{"pretrain": 3}'),
        ("SYNCD_AFTER", '{"pretrain": "x"}'),
    ],
)
def test_a_malformed_variable_is_a_usage_error(name: str, value: str):
    with pytest.raises(UsageError, match="stage's environment"):
        StageEnvironment.from_environ({**ENVIRONMENT.to_environ(), name: value})
