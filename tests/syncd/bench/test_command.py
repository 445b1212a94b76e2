import json
import signal
import subprocess
import sys

import pytest
from waiting import eventually

from protocol.bench import Report
from protocol.errors import ExitCode
from protocol.schema import decode

COMMAND = [sys.executable, "-m", "syncd", "bench", "link", "--quick"]


@pytest.fixture
def remote(tmp_path):
    folder = tmp_path / "remote"
    folder.mkdir()
    (folder / "of the user").write_text("stays")
    return folder


def left_on(remote):
    return [path.name for path in remote.iterdir()]


def test_it_measures_on_a_remote_of_the_users_and_leaves_nothing_there(tmp_path, remote):
    kept = tmp_path / "bench.json"
    done = subprocess.run(
        [*COMMAND, "--remote", str(remote), "--only", "burst", "-o", str(kept), "--json"],
        capture_output=True,
        text=True,
        check=True,
    )
    report = decode(Report, json.loads(kept.read_text()))
    assert json.loads(done.stdout) == report.to_json()
    assert [f.name for f in report.figures] == [
        "20 objects of 1 KiB uploaded side by side, on this remote, p50 of 3"
    ]
    assert report.machine["form"] == "quick"
    assert "removes it afterwards" in done.stderr
    assert str(kept) in done.stderr
    assert left_on(remote) == ["of the user"]


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_it_takes_everything_away_again(tmp_path, remote, sent):
    command = [*COMMAND, "--remote", str(remote), "--only", "append", "-o", str(tmp_path / "j")]
    with subprocess.Popen(command, stderr=subprocess.PIPE) as process:
        eventually(lambda: len(list(remote.glob("syncd-bench-*/append/w-*"))) == 1, within=60)
        process.send_signal(sent)
        try:
            _, told = process.communicate(timeout=60)
        finally:
            process.kill()  # or leaving the block would wait for it
    assert process.returncode == ExitCode.INTERRUPTED
    assert b"interrupted" in told
    assert left_on(remote) == ["of the user"]


def test_a_row_that_there_is_not_is_named_with_those_that_there_are():
    done = subprocess.run([*COMMAND, "--only", "fast"], capture_output=True, text=True, check=False)
    assert done.returncode == ExitCode.USAGE
    assert "'fast'" in done.stderr
    assert "append-far" in done.stderr
