"""Checkpoints that are really there: what is told of them, and what a new machine goes on from."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ends import Ends
from waiting import eventually

from protocol.checkpoints import CheckpointFile, CheckpointIndex, newest_safe
from protocol.schema import decode, loads
from protocol.states import Result

STAGES = '''
[stages.train]
command = """
ls $SYNCD_CHECKPOINT_DIR
for n in 1 2; do
  [ -e $SYNCD_CHECKPOINT_DIR/$n.pt ] && continue
  head -c 200000 /dev/urandom > $SYNCD_CHECKPOINT_DIR/$n.pt
  while [ ! -e $SYNCD_STORE/go-$n ]; do sleep 0.05; done
done
while [ ! -e $SYNCD_STORE/end ]; do sleep 0.05; done
"""
'''


def start(ends: Ends) -> Ends:
    ends.serve(stages=STAGES)
    ends.new_vm()
    ends.laptop.start()
    ends.vm.start()
    return ends


def index(ends: Ends) -> CheckpointIndex | None:
    """The laptop's copy of the index."""
    path = ends.laptop.layout.checkpoint_index
    return decode(CheckpointIndex, loads(path.read_bytes())) if path.exists() else None


def safe_file(ends: Ends, name: str) -> CheckpointFile:
    """Wait until the laptop knows that the only run is safe up to a file; return it."""

    def find() -> CheckpointFile | None:
        found = index(ends)
        (files,) = found.runs.values() if found and found.runs else ((),)
        safe = newest_safe(files)
        return safe if safe and safe.name == name else None

    return eventually(find, what=lambda: f"{index(ends)}\n{ends.told(1)}")


def test_the_laptop_is_told_up_to_which_checkpoint_a_run_is_safe(ends: Ends) -> None:
    start(ends)
    ends.append("run:train")
    first = safe_file(ends, "1.pt")
    assert first.size == 200_000

    def running() -> dict[str, Any]:
        return next(iter(ends.status().get("running", [])), {})

    eventually(lambda: running().get("safe") == "1.pt", what="the status does not tell it")
    assert running()["at_risk_since"] == max(first.made, running()["started"])
    eventually(
        lambda: "safe up to 1.pt; " in ends.laptop.layout.status.read_text(),
        what=ends.laptop.layout.status.read_text,
    )
    (ends.vm.layout.store / "go-1").touch()
    safe_file(ends, "2.pt")


def chunk_of(ends: Ends, sha256: str) -> Path:
    """The chunk that holds a content of the VM's, as it lies on the remote."""
    with sqlite3.connect(f"file:{ends.vm.layout.private}/state.db?mode=ro", uri=True) as state:
        (pieces,) = state.execute(
            "SELECT pieces FROM contents WHERE sha256 = ?", (sha256,)
        ).fetchone()
    (piece,) = json.loads(pieces)
    return Path(ends.remote) / piece["object"]


def torn(chunk: Path) -> None:
    body = chunk.read_bytes()
    chunk.unlink()
    chunk.write_bytes(body[: len(body) // 2])


def flipped(chunk: Path) -> None:
    body = bytearray(chunk.read_bytes())
    body[-1] ^= 1
    chunk.unlink()
    chunk.write_bytes(body)


FLIPPED = pytest.param(flipped, marks=pytest.mark.long)


@pytest.mark.parametrize("spoil", [torn, FLIPPED, Path.unlink])
def test_a_new_machine_goes_on_from_the_older_checkpoint_when_the_newest_is_not_whole(
    local_ends: Ends, spoil: Callable[[Path], None]
) -> None:
    ends = start(local_ends)
    ends.append("run:train")
    safe_file(ends, "1.pt")
    (ends.vm.layout.store / "go-1").touch()
    newest = safe_file(ends, "2.pt")
    (run_id,) = index(ends).runs  # type: ignore[union-attr]
    first = (ends.vm.layout.store / "checkpoints" / run_id / "1.pt").read_bytes()
    chunk = chunk_of(ends, newest.sha256)
    ends.lose_vm()
    spoil(chunk)
    ends.new_vm().start()
    folder = ends.vm.layout.store / "checkpoints" / run_id
    name = f"store/checkpoints/{run_id}/2.pt: not received"
    eventually(
        lambda: any(name in told for told in ends.status().get("problems", [])),
        what=lambda: ends.told(1),
    )
    eventually(lambda: b"attempt 2" in ends.log("train"), what=lambda: ends.told(1))
    assert (folder / "1.pt").read_bytes() == first
    (ends.vm.layout.store / "go-2").touch()
    (ends.vm.layout.store / "end").touch()
    assert ends.ended(1).result is Result.SUCCESS
    lines = ends.log("train").partition(b"attempt 2 at")[2].splitlines()
    assert lines[1] == b"1.pt"


@pytest.mark.parametrize("spoil", [torn, FLIPPED])
def test_a_checkpoint_that_comes_to_nothing_on_the_remote_is_sent_again_and_then_safe(
    local_ends: Ends, spoil: Callable[[Path], None]
) -> None:
    ends = start(local_ends)
    ends.append("run:train")
    first = safe_file(ends, "1.pt")
    chunk = chunk_of(ends, first.sha256)
    ends.vm.kill()
    with sqlite3.connect(ends.vm.layout.private / "state.db") as state:
        state.execute("DELETE FROM sums")  # as if it had not been looked at yet
    spoil(chunk)
    ends.vm.start()
    again = eventually(
        lambda: chunk_of_another(ends, first.sha256, chunk), what=lambda: ends.told(1)
    )
    safe_file(ends, "1.pt")
    assert again.exists()


def chunk_of_another(ends: Ends, sha256: str, chunk: Path) -> Path | None:
    """The chunk that holds a content now, once it is another one."""
    try:
        found = chunk_of(ends, sha256)
    except TypeError:  # for a moment it is in none
        return None
    return found if found != chunk else None


HELD = '''
[stages.train]
command = """
cd $SYNCD_CHECKPOINT_DIR; ls
[ -e 1.pt ] && exit 0
head -c 200000 /dev/urandom > 1.pt
while [ ! -e $SYNCD_STORE/remove ]; do sleep 0.05; done
rm 1.pt; touch $SYNCD_STORE/removed
while [ ! -e $SYNCD_STORE/save ]; do sleep 0.05; done
head -c 200000 /dev/urandom > 2.pt
sleep 1000
"""
'''


def names(ends: Ends) -> list[str]:
    """The checkpoints that the laptop knows to be on the remote."""
    found = index(ends)
    return [file.name for files in found.runs.values() for file in files] if found else []


def test_a_removed_checkpoint_is_dropped_once_a_newer_one_is_safe(local_ends: Ends) -> None:
    local_ends.serve(stages=HELD)
    ends = local_ends
    ends.new_vm()
    ends.laptop.start()
    ends.vm.start()
    ends.append("run:train")
    safe_file(ends, "1.pt")
    for step in ("remove", "save"):
        (ends.vm.layout.store / step).touch()
    eventually(lambda: names(ends) == ["2.pt"], within=30, what=lambda: str(index(ends)))
    safe_file(ends, "2.pt")


def test_a_machine_that_is_lost_before_the_newer_checkpoint_was_safe_leaves_the_older(
    local_ends: Ends,
) -> None:
    local_ends.serve(stages=HELD)
    ends = local_ends
    ends.new_vm()
    ends.laptop.start()
    ends.vm.start()
    ends.append("run:train")
    safe_file(ends, "1.pt")
    (ends.vm.layout.store / "remove").touch()
    eventually((ends.vm.layout.store / "removed").exists, what="the stage has not gone on")
    # A scan of the files, that goes by what is gone, is over once a later file has been sent.
    ends.sh("head -c 100000 /dev/urandom > $SYNCD_ARTIFACT_DIR/later.bin")
    ends.ended(2)
    ends.lose_vm()
    ends.new_vm().start()
    assert ends.ended(1).result is Result.SUCCESS
    assert ends.log("train").partition(b"attempt 2 at")[2].splitlines()[1] == b"1.pt"
