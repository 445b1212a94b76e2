"""Tests of trainer/cli.py and trainer/commands/, as a person or a script calls them."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from protocol.errors import ExitCode
from trainer.cli import POOL_COMMANDS, STAGES, main
from trainer.pool.format import open_pool
from trainer.pool.sample import read_index

TINY = """
[pretrain]
epochs = 1
threads = 1
batch_size = 64

[pretrain.encoder]
width = 16
depth = 1
heads = 2
"""


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("SYNCD_", "TRAINER_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("COLUMNS", "100")


@pytest.fixture
def settings(tmp_path: Path) -> Path:
    path = tmp_path / "trainer.toml"
    path.write_text(TINY)
    return path


def failure(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    """Return exit code and stderr of a command that fails, having said nothing on stdout."""
    code = main(arguments)
    out, err = capsys.readouterr()
    assert out == ""
    assert re.search(r"^trainer: error: ", err, re.MULTILINE)
    assert "Traceback" not in err
    return code, err


def test_help_names_every_command_and_comes_without_torch() -> None:
    begin = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "trainer", "--help"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert time.monotonic() - begin < 5
    for name in ("pool", "pretrain", "finetune", "export", "gate"):
        assert f" {name} " in done.stdout
    imported = {line.rsplit("|", 1)[-1].strip() for line in done.stderr.splitlines()}
    assert imported & {"protocol.errors"}
    assert not imported & {"torch", "numpy", "pyarrow", "onnx"}
    assert "\x1b[" not in done.stdout


@pytest.mark.parametrize(
    "command",
    ["", "pool", *(f"pool {name}" for name in POOL_COMMANDS), *STAGES, "check"],
)
def test_each_command_shows_examples(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command.split(), "--help"]) == ExitCode.OK
    examples = capsys.readouterr().out.split("\nExamples:\n")[1]
    assert f"    trainer {command}".rstrip() in examples


@pytest.mark.parametrize("code", ExitCode)
def test_help_says_what_each_exit_code_means(
    code: ExitCode, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--help"]) == ExitCode.OK
    said = re.search(rf"^ +{code.value} +\w", capsys.readouterr().out, re.MULTILINE)
    assert bool(said) == (code is not ExitCode.REMOTE)


def test_the_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == ExitCode.OK
    assert capsys.readouterr().out.strip().count(".") == 2


def test_a_pool_is_built_sampled_and_described(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pool, index, plot = tmp_path / "pool", tmp_path / "index.json", tmp_path / "plot.png"
    corpora = ["--corpora", "GunPoint", "--corpora", "ACSF1"]
    assert main(["pool", "build", "--output", str(pool), *corpora]) == 0
    assert "GunPoint" in capsys.readouterr().out

    assert main(["pool", "sample", str(pool), "--size", "100", "-o", str(index)]) == 0
    assert "no corpus is favoured" in capsys.readouterr().out
    assert read_index(index, open_pool(pool)).size == 100

    arguments = ["--index", str(index), "--plot", str(plot), "--check", "--json"]
    assert main(["pool", "describe", str(pool), *arguments]) == 0
    described = json.loads(capsys.readouterr().out)
    assert described["sample"]["size"] == 100
    assert plot.stat().st_size > 1000


def test_a_stage_prints_its_report_and_nothing_else_as_json(
    pool_path: Path, tmp_path: Path, settings: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--pool", str(pool_path), "--output", str(tmp_path / "runs"), "--json"]
    assert main(["pretrain", "--config", str(settings), *arguments]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["run_id"] == "pretrain.0001.0000"
    assert (report["config"]["epochs"], report["config"]["encoder"]["width"]) == (1, 16)


def test_flag_beats_environment_beats_file_beats_default(
    pool_path: Path,
    tmp_path: Path,
    settings: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TRAINER_PRETRAIN_SEED", "5")
    monkeypatch.setenv("TRAINER_PRETRAIN_BATCH_SIZE", "128")
    arguments = ["--pool", str(pool_path), "--output", str(tmp_path / "runs"), "--json"]
    assert main(["--config", str(settings), "pretrain", "--seed", "7", *arguments]) == 0
    config = json.loads(capsys.readouterr().out)["config"]
    assert (config["seed"], config["batch_size"], config["epochs"]) == (7, 128, 1)
    assert config["mask"] == 0.4


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[pretran]\nepochs = 1", "[pretran] is no command's table. Did you mean [pretrain]?"),
        ("epochs = 1", "[epochs] is no command's table. Tables: pool.build, pool.describe"),
        ("[pretrain]\nepoch = 1", "Did you mean --epochs?"),
        ("[pretrain]\nepochs = 'many'", 'unable to convert "many" into int'),
        ("[pretrain.encoder]\nwidht = 1", "widht"),
        ("[pretrain", "not TOML"),
        ("# \udce9", "not TOML"),
        ("[pretrain]\nepochs = 1.5", 'unable to convert "1.5" into int'),
        ("[pretrain]\nepochs = true", 'unable to convert "True" into int'),
        (
            "[pool.bild]\nshards = 2",
            "[pool.bild] is no command's table. Did you mean [pool.build",
        ),
        ("[pool]\nshards = 2", "[pool.shards] is no command's table"),
        ("pool = 3", "[pool.] is no command's table"),
    ],
)
def test_a_wrong_settings_file_is_an_error_that_names_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, said: str
) -> None:
    path = tmp_path / "wrong.toml"
    path.write_text(text, errors="surrogateescape")
    code, err = failure(capsys, "pretrain", "--config", str(path))
    assert code == ExitCode.CONFIG
    assert said in err
    assert str(path) in err


def test_a_missing_settings_file_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    code, err = failure(capsys, "pretrain", "--config", "none.toml")
    assert code == ExitCode.CONFIG
    assert "none.toml: No such file" in err


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["frobnicate"], ExitCode.USAGE, "unknown command 'frobnicate'. Commands: pool, pretrain"),
        (["pretrian"], ExitCode.USAGE, "Did you mean 'pretrain'?"),
        (["pool", "descrbe"], ExitCode.USAGE, "Did you mean 'describe'?"),
        (["pretrain", "--epoch", "3"], ExitCode.USAGE, "Did you mean --epochs?"),
        (["pretrain", "--epochs", "few"], ExitCode.USAGE, "unable to convert"),
        (["pretrain", "--epochs", "0"], ExitCode.USAGE, "epochs is 0; it must be from 1"),
        (["pretrain", "--rate", "inf"], ExitCode.USAGE, "rate is inf; it must be above 0, at most"),
        (["finetune", "--rate", "nan"], ExitCode.USAGE, "rate is nan; it must be above 0, at most"),
        (["gate", "--seed=-1"], ExitCode.USAGE, "seed is -1; it must be from 0"),
        (["pool", "sample", "--size", "1.5"], ExitCode.USAGE, 'unable to convert "1.5" into int'),
        (["gate", "--output", "a_file"], ExitCode.DATA, "a_file: Not a directory"),
        (["pool", "build", "--length", "1000000000"], ExitCode.USAGE, "it must be from 2 to 65536"),
        (["check", "a_file"], ExitCode.DATA, "a_file: cut short"),
        (["pretrain", "--run-id", "x", "--resume"], ExitCode.USAGE, "both given"),
        (["pool", "sample", "--output", "x"], ExitCode.USAGE, "--size"),
        (["pool", "describe", "nowhere"], ExitCode.DATA, "nowhere/pool.json: no such folder"),
        (["pretrain", "--pool", "nowhere"], ExitCode.DATA, "nowhere/pool.json: no such folder"),
    ],
)
def test_a_users_mistake_is_one_message_and_its_exit_code(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    code: ExitCode,
    said: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a_file").touch()
    got, err = failure(capsys, *arguments)
    assert got == code
    assert said in err


def without(module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command in a process where `module` cannot be imported."""
    program = (
        f"import sys; sys.modules[{module!r}] = None; from trainer.cli import main; "
        f"sys.exit(main({list(arguments)!r}))"
    )
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )


def test_a_package_that_is_not_installed_is_named_with_what_to_do() -> None:
    done = without("pyarrow", "pool", "describe")
    assert done.returncode == ExitCode.USAGE
    assert "needs the package pyarrow. pip install 'syncd[trainer]'" in done.stderr


def test_a_module_of_ours_that_cannot_be_imported_is_a_fault_of_ours() -> None:
    done = without("trainer.pool.format", "pool", "describe")
    assert done.returncode == ExitCode.FAULT
    assert "Traceback" in done.stderr


def test_an_interrupt_ends_with_130_and_says_how_to_go_on(
    pool_path: Path, tmp_path: Path, settings: Path
) -> None:
    output = tmp_path / "runs"
    arguments = ["--pool", str(pool_path), "--output", str(output), "--epochs", "5000"]
    process = subprocess.Popen(
        [sys.executable, "-m", "trainer", "pretrain", "--config", str(settings), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("epoch 6/"):
            break
    assert list(output.glob("store/checkpoints/*/checkpoint-*.json"))
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == ExitCode.INTERRUPTED
    assert "interrupted; --resume goes on from the last checkpoint" in err
    assert "Traceback" not in out + err


def test_a_nul_character_in_the_settings_is_refused(tmp_path, capsys):
    path = tmp_path / "trainer.toml"
    path.write_text('[pretrain]\npool = "a\\u0000b"\n')
    assert main(["--config", str(path), "pretrain"]) == ExitCode.CONFIG
    assert "NUL character" in capsys.readouterr().err
