"""What nvidia-smi prints, and what of the GPUs' memory an attempt did not give back."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import eventually

from protocol.states import Result
from syncd.stages.attempt import prepare
from syncd.stages.attempt_files import AttemptSpec, read_file
from syncd.stages.causes import ExitRecord
from syncd.stages.gpu_memory import GpuUse, parse, read_gpus, still_held

MIB = 2**20
# Two GPUs, and a process on one of them, in the form of --format=csv,noheader,nounits.
PRINTED = """0, GPU-2c4d81c3, 4
1, GPU-90ab33fe, 1510
GPU-90ab33fe, 4711, 1496
"""


def use(used: int, **processes: int) -> GpuUse:
    listed = {f"0/{pid.removeprefix('p')}": held * MIB for pid, held in processes.items()}
    return GpuUse(used={"0": used * MIB}, processes=listed)


def test_what_nvidia_smi_prints_is_read() -> None:
    assert parse(PRINTED) == GpuUse(
        used={"0": 4 * MIB, "1": 1510 * MIB}, processes={"1/4711": 1496 * MIB}
    )


@pytest.mark.parametrize(
    "text",
    [
        "",
        "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.\n",
        "0, GPU-1, [N/A]\nGPU-1, 4711, [N/A]\nGPU-2, 4711, 5\n",
        "No devices were found\n",
    ],
)
def test_what_says_no_numbers_says_nothing(text: str) -> None:
    assert parse(text) == GpuUse()


@pytest.mark.parametrize(
    ("before", "now", "alive", "said"),
    [
        (use(4), use(4), (), []),
        (use(4), use(100), (), []),  # the driver's own ups and downs
        (use(4), use(1233), (), ["GPU 0 still holds 1.2 GiB"]),
        (use(4), use(1233, p9=1229), (), ["GPU 0 still holds 1.2 GiB (process 9)"]),
        # One that was listed before is not of the attempt.
        (use(4, p9=2), use(1233, p9=2), (), ["GPU 0 still holds 1.2 GiB"]),
        # What the living hold is theirs, as far as it goes.
        (use(4), use(1233, p9=1229), (9,), []),
        (use(900, p9=800), use(1300, p9=1200), (9,), []),
        (use(4), use(2052, p9=1024), (9,), ["GPU 0 still holds 1.0 GiB"]),
        (use(9000), use(4), (), []),
        (GpuUse(), use(9000), (), []),  # a GPU that was not there is not known
    ],
)
def test_what_rose_and_is_not_the_livings_is_still_held(
    before: GpuUse, now: GpuUse, alive: tuple[int, ...], said: list[str]
) -> None:
    assert list(still_held(before, now, lambda pid: pid in alive)) == said


def test_without_nvidia_smi_nothing_is_known(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert read_gpus() is None


HOLDS_A_GIB = (
    "import torch; x = torch.zeros(2**28, device='cuda'); print('up', flush=True); input()"
)


@pytest.mark.skipif(not shutil.which("nvidia-smi"), reason="needs a GPU")
def test_a_real_gpu_tells_of_a_gib_and_of_its_end() -> None:
    before = read_gpus()
    assert before is not None
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDS_A_GIB],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "0"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"up\n"
        now = read_gpus()
        assert now is not None
        assert now.used["0"] - before.used["0"] > 2**30
        (said,) = still_held(before, now, lambda pid: False)
        assert said.startswith("GPU 0 still holds 1.")
    finally:
        holder.kill()
        holder.communicate()  # which closes the pipes too

    def freed() -> bool:
        left = read_gpus()
        return left is not None and not list(still_held(before, left, lambda pid: False))

    eventually(freed, what="the memory was not freed")


@pytest.mark.skipif(not shutil.which("nvidia-smi"), reason="needs a GPU")
def test_a_stage_that_is_killed_with_memory_of_a_real_gpu_gives_it_back(tmp_path: Path) -> None:
    spec = AttemptSpec(
        run_id="train.0001.7f3a",
        stage="train",
        attempt=1,
        line="run:train",
        command=(sys.executable, "-c", HOLDS_A_GIB.replace("input()", "import os; os.abort()")),
        cwd=str(tmp_path),
        log=str(tmp_path / "train.log"),
        gpu=1.0,
    )
    folder = prepare(tmp_path / "runs" / spec.run_id, spec)
    command = [sys.executable, "-m", "syncd.stages.supervisor", str(folder)]
    assert subprocess.run(command, check=False, timeout=120).returncode == 0
    noted = read_file(folder / "gpu.json", GpuUse)
    assert noted is not None
    assert noted.used["0"] >= 0
    record = read_file(folder / "exit.json", ExitRecord)
    assert record is not None
    assert (record.result, record.cause) == (Result.KILLED, "SIGABRT; last line: up")
