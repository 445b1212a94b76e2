"""Full disks, floods, long lines, many files and large ones, with real daemons at both ends."""

from __future__ import annotations

import contextlib
import os
import re
import sqlite3
from pathlib import Path

import pytest
from ends import End, Ends
from machine import fill, peak_memory, small_disk
from waiting import eventually

from protocol.logs import LogEnd, LogStart, parse_log_line
from protocol.states import Result
from syncd.delivery.contents import file_sha256
from syncd.holes import held
from syncd.log_parts import LOG_BUDGET, rotated

MEMORY = 150 * 1000 * 1000
LONG = pytest.mark.long
pytestmark = pytest.mark.timeout(1200)


def assert_small(*ends: End) -> None:
    """No daemon ever took more memory than it may; rclone is a process of its own."""
    for end in ends:
        assert end.process is not None
        peak = peak_memory(end.process.pid)
        print(f"{end.layout.root.name}: {peak / 1e6:.0f} MB at most")
        assert peak < MEMORY, end.layout.root


def start(ends: Ends, stages: str, *, bwlimit: str = "") -> Ends:
    ends.serve(stages=stages)
    vm = ends.new_vm()
    if bwlimit:
        with open(vm.layout.settings, "a", encoding="utf-8") as settings:
            settings.write(f'\nbwlimit = "{bwlimit}"\n')
    ends.laptop.start()
    vm.start()
    return ends


# Logs

FLOOD = """
[stages.flood]
gpu = 0
command = '''
python3 -c "
import sys, time
began, at = time.monotonic(), 0
for number in range({lines}):
    sys.stdout.write('%07d %s\\\\n' % (number, 'x' * 991))
    at += 1000
    time.sleep(max(began + at / {rate} - time.monotonic(), 0))
"'''
[stages.talk]
gpu = 0
command = "for n in 1 2 3; do echo talk $n; done"
"""


def test_a_log_that_grows_by_100_mb_a_minute_arrives_whole_and_starves_nobody(
    local_ends: Ends,
) -> None:
    ends = start(local_ends, FLOOD.format(lines=8000, rate=100_000_000 / 60))
    ends.append("run:flood")
    ends.started(1)
    ends.append("run:talk")
    assert ends.ended(2).result is Result.SUCCESS
    assert b"talk 3\n" in ends.log("talk")
    assert ends.ended(1).result is Result.SUCCESS
    assert ends.log("flood") == (ends.vm.layout.inbox / "flood.log").read_bytes()
    assert_small(ends.laptop, ends.vm)


@pytest.mark.long
def test_a_flood_is_kept_within_its_budget_at_both_ends_with_the_newest_kept(
    local_ends: Ends,
) -> None:
    lines = 800_000
    line = f"%07.0f {'x' * 991}"  # as fast as can be, unlike what talks through PYTHONUNBUFFERED
    ends = start(
        local_ends,
        f"""
[stages.flood]
gpu = 0
command = "seq -f '{line}' 0 {lines - 1}"
""",
    )
    ends.append("run:flood")
    assert ends.ended(1, seconds=500).result is Result.SUCCESS
    there = ends.vm.layout.inbox / "flood.log"
    here = ends.laptop.layout.inbox / "flood.log"
    for log in (there, here):
        # Of the laptop's, a part is a whole number of segments.
        assert held(log) + held(rotated(log)) <= LOG_BUDGET + 20_000_000
    last = b"%07d " % (lines - 1)
    tail = here.read_bytes().splitlines()[-2:]
    assert tail[0].startswith(last)
    assert isinstance(parse_log_line(tail[1]), LogEnd)
    assert b"\0" not in here.read_bytes()
    assert_small(ends.laptop, ends.vm)


def test_a_line_of_10_mb_is_a_line_like_any_other(local_ends: Ends) -> None:
    ends = start(
        local_ends,
        """
[stages.line]
gpu = 0
command = "head -c 10000000 /dev/zero | tr '\\\\0' x; echo; echo short"
""",
    )
    ends.append("run:line")
    assert ends.ended(1).result is Result.SUCCESS
    assert ends.log("line") == (ends.vm.layout.inbox / "line.log").read_bytes()
    first, line, short, last = ends.log("line").splitlines()
    assert isinstance(parse_log_line(first), LogStart)
    assert line == b"x" * 10_000_000
    assert short == b"short"
    assert isinstance(parse_log_line(last), LogEnd)
    assert_small(ends.laptop, ends.vm)


# Files


@pytest.mark.parametrize("count", [1000, pytest.param(60_000, marks=LONG)])
def test_many_small_files_arrive_as_one_payload(local_ends: Ends, count: int) -> None:
    ends = local_ends
    folder = ends.laptop.layout.serve / "clips"
    for number in range(count):
        if number % 1000 == 0:
            (folder / str(number // 1000)).mkdir(parents=True)
        (folder / str(number // 1000) / f"{number}.txt").write_text(f"clip {number}\n")
    start(
        ends,
        """
[stages.count]
gpu = 0
command = "cat $(find clips -type f) | sort -u | wc -l"
""".replace("cat $(find clips -type f)", "find clips -type f -exec cat {} +"),
    )
    ends.append("run:count")
    assert ends.ended(1, seconds=500).result is Result.SUCCESS
    assert ends.log("count").splitlines()[1].strip() == str(count).encode()
    # A change of one file travels alone.
    (folder / "0" / "0.txt").write_text("changed\n")
    ends.append("run:count")
    assert ends.ended(2, seconds=500).result is Result.SUCCESS
    assert_small(ends.laptop, ends.vm)


CHECKPOINT = """
[stages.train]
gpu = 0
command = '''
f=$SYNCD_CHECKPOINT_DIR/{size}.pt
[ -e $f ] && {{ sha256sum < $f; exit 0; }}
truncate -s {size} $f.tmp
echo begin | dd of=$f.tmp conv=notrunc status=none
head -c 1000000 /dev/urandom >> $f.tmp
mv $f.tmp $f
sha256sum < $f
while [ ! -e $SYNCD_STORE/go ]; do sleep 0.05; done'''
"""


def is_known(ends: Ends, name: str) -> bool:
    """Whether the laptop was told of a file of the worker's, which it does not fetch."""
    with contextlib.closing(sqlite3.connect(ends.laptop.layout.private / "state.db")) as state:
        rows = state.execute("SELECT 1 FROM remote_files WHERE path LIKE ?", (f"%/{name}",))
        return rows.fetchone() is not None


@pytest.mark.parametrize("size", [100_000_000, pytest.param(5_000_000_000, marks=LONG)])
def test_a_large_checkpoint_is_on_the_next_machine_whole(local_ends: Ends, size: int) -> None:
    ends = start(local_ends, CHECKPOINT.format(size=size))
    ends.append("run:train")
    ends.started(1)
    eventually(lambda: is_known(ends, f"{size}.pt"), within=500, what=lambda: ends.told(1))
    assert_small(ends.laptop, ends.vm)
    ends.lose_vm()
    ends.new_vm().start()
    assert ends.ended(1, seconds=500).result is Result.SUCCESS
    first, second = re.findall(rb"^[0-9a-f]{64}", ends.log("train"), re.MULTILINE)
    assert first == second
    assert_small(ends.laptop, ends.vm)


def _chunks(remote: Path) -> list[Path]:
    """Chunks on the remote, those that are still arriving included."""
    return list(remote.glob("w-*/*-chunk-*"))


@pytest.mark.parametrize("ends", ["webdav"], indirect=True)
def test_nothing_starves_while_a_large_file_travels(ends: Ends) -> None:
    start(
        ends,
        """
[stages.talk]
gpu = 0
command = '''
head -c 20000000 /dev/urandom > $SYNCD_ARTIFACT_DIR/large.bin
n=0
while [ ! -e $SYNCD_STORE/go ]; do
    n=$((n+1)); echo tick $n; sleep 0.1
    printf '{"step": %d}' $n > $SYNCD_PROGRESS_FILE.new
    mv $SYNCD_PROGRESS_FILE.new $SYNCD_PROGRESS_FILE
done'''
""",
        bwlimit="1M",
    )
    ends.append("run:talk")
    remote = ends.folder / "server" / "files"
    ends.started(1)
    eventually(lambda: _chunks(remote), within=30, what=lambda: ends.told(1))
    seen: list[tuple[int, float]] = []

    def news() -> bool:
        """Note how far log and status are, whenever both have moved on."""
        step = ends.status().get("running", [{}])[0].get("progress", {}).get("step", 0)
        now = ends.log("talk").count(b"\ntick "), step
        if not seen or all(new > old for new, old in zip(now, seen[-1], strict=True)):
            seen.append(now)
        return len(seen) >= 3

    eventually(news, within=60, what=lambda: f"{seen}\n{ends.told(1)}")
    arrived = ends.laptop.layout.artifacts / ends.journal()[1].run_id / "large.bin"
    assert not arrived.exists()
    assert sum(chunk.stat().st_size for chunk in _chunks(remote)) < 20_000_000
    (ends.vm.layout.store / "go").touch()
    assert ends.ended(1, seconds=120).result is Result.SUCCESS
    eventually(arrived.exists, within=60)
    made = ends.vm.layout.artifacts / ends.journal()[1].run_id / "large.bin"
    assert file_sha256(arrived) == file_sha256(made)


# Full disks

TALK = """
[stages.talk]
gpu = 0
command = "for n in $(seq 20000); do echo line $n of many; done"
[stages.full]
gpu = 0
command = "head -c 1G /dev/zero > $SYNCD_STORE/fill"
"""


def test_a_full_disk_at_the_laptop_loses_nothing(tmp_path: Path) -> None:
    (tmp_path / "remote").mkdir()
    with small_disk(tmp_path / "laptop", 160):
        ends = Ends(tmp_path, str(tmp_path / "remote"))
        try:
            start(ends, TALK)
            ends.append("run:talk", "run:talk")
            ends.ended(2)
            whole = ends.log("talk")
            ends.append("run:talk")
            fill(ends.laptop.layout.root / "filler")
            there = ends.vm.layout.inbox / "talk.log"
            eventually(lambda: there.read_bytes().count(b"[syncd] end") == 3, within=60)
            said = lambda: re.search("(?i)full|no space", ends.laptop.output.read_text())  # noqa: E731
            eventually(said, within=60, what=lambda: ends.told(3))
            assert ends.laptop.process is not None
            assert ends.laptop.process.poll() is None
            (ends.laptop.layout.root / "filler").unlink()
            assert ends.ended(3, seconds=90).result is Result.SUCCESS
            assert ends.log("talk") == there.read_bytes()
            assert ends.log("talk").startswith(whole)
        finally:
            ends.close()


def test_a_full_disk_at_the_worker_ends_the_stage_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "remote").mkdir()
    with small_disk(tmp_path / "vm1", 200):
        ends = Ends(tmp_path, str(tmp_path / "remote"))
        try:
            start(ends, TALK)
            ends.append("run:talk")
            ends.ended(1)
            ends.append("run:full")
            fills = ends.vm.layout.store / "fill"
            eventually(lambda: os.statvfs(ends.vm.layout.root).f_bavail == 0, within=60)
            assert ends.vm.process is not None
            assert ends.vm.process.poll() is None
            os.truncate(fills, 0)
            record = ends.ended(2, seconds=90)
            assert record.result is Result.FAILED
            assert "disk full" in record.cause
            ends.append("run:talk")
            assert ends.ended(3, seconds=90).result is Result.SUCCESS
            assert ends.log("talk") == (ends.vm.layout.inbox / "talk.log").read_bytes()
        finally:
            ends.close()
