"""Checkpoints between real ends: told as safe only when they are, and restored by the next VM."""

from __future__ import annotations

import contextlib
import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from bridging import BridgeProcess
from ends import Ends
from waiting import eventually

from protocol.checkpoints import CheckpointIndex
from protocol.paths import Layout
from protocol.schema import decode
from protocol.states import Result

# Each attempt tells which checkpoints it finds. `do-save-N` beside the store has it make one of
# its number, `do-prune` has it then remove all others, and `do-go` ends it.
STAGES = """
[stages.train]
gpu = 0
command = '''
cd $SYNCD_CHECKPOINT_DIR
for f in *.pt; do [ -e $f ] && echo "found $f $(sha256sum < $f | cut -c1-64)"; done
echo looked
n=1
while [ ! -e $SYNCD_STORE/../do-go ]; do
    if [ -e $SYNCD_STORE/../do-save-$n ]; then
        cp $SYNCD_STORE/../do-save-$n $n.new.tmp
        mv $n.new.tmp $n.pt
        echo "made $n.pt $(sha256sum < $n.pt | cut -c1-64)"
        [ -e $SYNCD_STORE/../do-prune ] && ls | grep -v "^$n.pt" | xargs -r rm
        n=$((n+1))
    fi
    sleep 0.05
done'''
"""
SIZE = 300_000


def begin(ends: Ends) -> None:
    ends.serve(stages=STAGES)
    ends.new_vm()
    ends.laptop.start()
    ends.vm.start()
    ends.append("run:train")
    ends.started(1)


def save(ends: Ends, number: int, data: bytes) -> None:
    """Have the stage make a checkpoint."""
    path = ends.vm.layout.root / f"do-save-{number}"
    path.with_suffix(".tmp").write_bytes(data)
    path.with_suffix(".tmp").rename(path)


def index(layout: Any) -> CheckpointIndex:
    try:
        return decode(CheckpointIndex, json.loads(layout.checkpoint_index.read_bytes()))
    except FileNotFoundError:
        return CheckpointIndex()


def safe(ends: Ends, *, at_laptop: bool = True) -> dict[str, str]:
    """The safe checkpoints of the first run and how that is known."""
    layout = (ends.laptop if at_laptop else ends.vm).layout
    found = index(layout).runs.get(ends.journal()[1].run_id, ())
    return {file.path: file.how for file in found if file.safe is not None}


def is_safe(ends: Ends, number: int, **where: bool) -> None:
    eventually(
        lambda: f"{number}.pt" in safe(ends, **where),
        within=60,
        what=lambda: f"{index(ends.vm.layout)}\n{ends.told(1)}",
    )


def running(ends: Ends) -> dict[str, Any]:
    found = ends.status().get("running", [])
    return dict(found[0]) if found else {}


def second_attempt(layout: Layout) -> dict[str, Any]:
    """What a worker's own status says of the run while its second attempt runs; else nothing."""
    path = layout.private / "status.json"
    found = json.loads(path.read_bytes())["running"] if path.exists() else []
    return next((dict(run) for run in found if run["attempt"] == 2), {})


def told(ends: Ends, word: bytes) -> list[list[bytes]]:
    """Names and hashes that the stage told after a word."""
    lines = (line.split() for line in ends.log("train").splitlines())
    return [words[1:] for words in lines if words[:1] == [word]]


def test_a_checkpoint_is_told_as_safe_and_found_by_the_next_vm(local_ends: Ends) -> None:
    ends = local_ends
    begin(ends)
    eventually(lambda: running(ends), what=lambda: ends.told(1))
    save(ends, 1, b"1" * SIZE)
    is_safe(ends, 1)
    eventually(lambda: running(ends)["checkpoint"] == "1.pt", within=30)
    eventually(lambda: "safe up to 1.pt; " in ends.laptop.layout.status.read_text(), within=30)
    assert running(ends)["at_risk_since"] == pytest.approx(
        index(ends.vm.layout).runs[ends.journal()[1].run_id][0].made
    )
    ends.lose_vm()
    ends.new_vm().start()
    again = eventually(lambda: second_attempt(ends.vm.layout), within=60)
    assert again["checkpoint"] == "1.pt", "what it began with is safe from the start"
    assert again["at_risk_since"] == again["started"]
    eventually(
        lambda: ends.log("train").count(b"\nlooked") == 2, within=60, what=lambda: ends.told(1)
    )
    made, found = (told(ends, word) for word in (b"made", b"found"))
    assert made == found != []
    # When it was restored, and not once more.
    eventually(lambda: set(safe(ends).values()) == {"read back"}, within=30)
    (ends.vm.layout.root / "do-go").touch()
    assert ends.ended(1).result is Result.SUCCESS


def newest_chunk(remote: Path) -> Path:
    return max(remote.glob("w-*/*-chunk-*"), key=lambda path: path.name)


@pytest.mark.parametrize("harm", ["torn", "missing"])
def test_a_checkpoint_harmed_on_the_remote_is_left_out_and_the_one_before_it_is_used(
    local_ends: Ends, harm: str
) -> None:
    ends = local_ends
    begin(ends)
    save(ends, 1, b"1" * SIZE)
    is_safe(ends, 1)
    before = newest_chunk(ends.folder / "remote")
    save(ends, 2, b"2" * SIZE)
    is_safe(ends, 2)
    ends.lose_vm()
    chunk = newest_chunk(ends.folder / "remote")
    assert chunk != before
    if harm == "missing":
        chunk.unlink()
    else:
        torn = chunk.read_bytes()[: SIZE // 2]
        chunk.unlink()  # it may be one file with the laptop's
        chunk.write_bytes(torn)
    ends.new_vm().start()
    eventually(
        lambda: ends.log("train").count(b"\nlooked") == 2, within=60, what=lambda: ends.told(1)
    )
    assert [name for name, _ in told(ends, b"found")] == [b"1.pt"]
    eventually(lambda: any("2.pt" in p for p in ends.status()["problems"]), within=30)


def kept(ends: Ends) -> set[str]:
    """The checkpoints that the laptop was told of."""
    with contextlib.closing(sqlite3.connect(ends.laptop.layout.private / "state.db")) as state:
        rows = state.execute("SELECT path FROM remote_files WHERE path LIKE '%.pt'").fetchall()
    return {path.rpartition("/")[2] for (path,) in rows}


def test_over_a_bridge_the_laptop_gives_its_word_and_what_is_pruned_goes_then(
    local_ends: Ends,
) -> None:
    ends = local_ends
    bridge = BridgeProcess(ends.laptop.layout)
    bridge.start()
    try:
        ends.remote = bridge.remote
        begin(ends)
        save(ends, 1, b"1" * SIZE)
        is_safe(ends, 1)
        (ends.vm.layout.root / "do-prune").touch()
        save(ends, 2, b"2" * SIZE)
        is_safe(ends, 2)
        assert set(safe(ends).values()) == {"the controller's word"}
        eventually(lambda: kept(ends) == {"2.pt"}, within=60, what=lambda: str(kept(ends)))
    finally:
        bridge.kill()
