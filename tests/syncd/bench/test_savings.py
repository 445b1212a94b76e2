"""What chunks by content hash would save, of files that are made so that it is known."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import ExitCode, RunFailedError
from syncd.bench.savings import CUTS, by_content, figures, read, sent, written
from syncd.cli import main

ONE = os.urandom(400_000)


@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
def test_equal_files_cost_nothing_and_others_all(cut):
    assert sent([ONE, ONE, ONE], cut) == 0
    assert sent([ONE, os.urandom(400_000)], cut) == 1


def test_of_what_has_moved_only_pieces_by_content_are_known_again():
    moved = b"x" * 100 + ONE
    assert sent([ONE, moved], CUTS["blocks of 4 KiB"]) == 1
    assert 0 < sent([ONE, moved], by_content) < 0.1


def test_of_what_was_changed_in_place_blocks_are_known_again():
    changed = ONE[:200_000] + os.urandom(40_960) + ONE[240_960:]
    assert 0.1 < sent([ONE, changed], CUTS["blocks of 4 KiB"]) < 0.15


@given(st.binary(max_size=100_000), st.sampled_from(list(CUTS.values())))
def test_the_pieces_make_up_the_file(data, cut):
    assert b"".join(cut(data)) == data


def test_what_a_training_removes_again_is_measured_too(tmp_path: Path):
    folder = tmp_path / "checkpoints"
    program = (
        "import pathlib, time, sys\n"
        "folder = pathlib.Path(sys.argv[1])\n"
        "kept = folder.parent\n"
        "for n in range(3):\n"
        "    new = folder / f'{n}.tmp'; new.write_bytes(bytes([n]) * 1000)\n"
        "    new.rename(folder / f'{n}.pt')\n"
        "    while len(list(kept.glob('.kept-*/*'))) <= n: time.sleep(0.01)\n"
        "    (folder / f'{n}.pt').unlink()\n"
    )
    files = written(folder, [sys.executable, "-c", program, str(folder)], "*.pt")
    assert files == [bytes([n]) * 1000 for n in range(3)]
    assert read(folder, "*.pt") == []
    assert not list(tmp_path.glob(".kept-*"))


def test_what_is_sent_is_told_in_percent_of_what_there_is():
    whole = figures([ONE, ONE, os.urandom(400_000)])[0]
    assert (whole.value, whole.unit) == (50.0, "%")
    assert whole.name == "sent, as whole files, of the 781.2 KiB of 2 checkpoints after the first"


@pytest.mark.parametrize(
    ("command", "told"),
    [
        (["-c", "print('before'); raise SystemExit('no pool here')"], "ended with 1: no pool here"),
        (["-c", "import sys; sys.exit(3)"], "ended with 3: and printed nothing"),
    ],
)
def test_a_training_that_fails_is_told_with_its_last_line(tmp_path: Path, command, told):
    with pytest.raises(RunFailedError, match=told) as caught:
        written(tmp_path / "runs", [sys.executable, *command], "*.pt")
    assert str(caught.value).startswith(f"run {sys.executable} -c ")


def test_a_command_or_a_folder_that_is_not_there_is_named(tmp_path: Path, capsys):
    bench, folder = ["bench", "checkpoints"], str(tmp_path / "none")
    assert main([*bench, folder]) == ExitCode.USAGE
    assert f"{folder}: there is no such folder" in capsys.readouterr().err
    assert main([*bench, folder, "--", "no-such-program"]) == ExitCode.RUN_FAILED
    assert "run no-such-program: No such file" in capsys.readouterr().err
