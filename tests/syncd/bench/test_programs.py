import itertools
import os
import subprocess
import time
import zlib

from syncd.bench.programs import READY, drawn_bar, incompressible, program, training_log


def run(name, *arguments, **environ):
    return subprocess.run(
        program(name, *arguments), env={**os.environ, **environ}, capture_output=True, check=True
    ).stdout


def test_lines_begin_with_the_time_at_which_they_were_written():
    before = time.time_ns()
    stamps = [int(line.split()[0]) for line in run("lines", 2).splitlines()]
    assert before < stamps[0] < stamps[1] < time.time_ns()


def test_a_training_log_repeats_its_words_and_not_its_numbers():
    lines = list(itertools.islice(training_log(seed=1), 2000))
    assert len(set(lines)) == len(lines)
    data = "".join(lines).encode()
    assert 0.1 < len(zlib.compress(data)) / len(data) < 0.4


def test_text_is_written_at_its_rate():
    data = run("text", 2, 16384)
    assert 24_000 < len(data) < 34_000
    assert data.endswith(f"{READY}\n".encode())


def test_a_bar_is_drawn_over_itself():
    assert drawn_bar(75, 150, 7.5).startswith("\r 50%|█████     | 75/150 [00:07<00:07,  10.00it/s")
    assert run("bar", 0.0).decode() == f"{READY}\n"


def test_what_cannot_be_compressed_is_one_line_that_draws_over_nothing():
    data = incompressible(4096)
    assert len(data) == 4096
    assert (data.count(b"\n"), data.count(b"\r")) == (1, 0)
    assert len(zlib.compress(data)) > 4000


def test_a_large_log_waits_for_its_last_bytes_to_be_asked_for(tmp_path):
    go = tmp_path / "go"
    with subprocess.Popen(program("large", 5000, go), stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        first = process.stdout.read(5000 + len(READY) + 1)
        go.touch()
        rest = process.stdout.read()
    assert first.endswith(f"{READY}\n".encode())
    assert len(rest) == 4096


def test_an_artefact_is_moved_into_its_folder(tmp_path):
    (tmp_path / "artifacts").mkdir()
    (tmp_path / "model.bin").write_text("weights")
    run(
        "artifact",
        tmp_path / "model.bin",
        tmp_path / "mark",
        SYNCD_ARTIFACT_DIR=f"{tmp_path}/artifacts",
    )
    assert (tmp_path / "artifacts" / "model.bin").read_text() == "weights"
    assert int((tmp_path / "mark").read_text()) < time.time_ns()
