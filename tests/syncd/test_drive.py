"""Both real daemons over rclone's drive backend and a stand-in for Google Drive: not Google's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from ends import Ends
from fake_drive import FakeDrive
from waiting import eventually

from protocol.states import Result, State

STAGES = '''
[stages.talk]
command = """
for n in $(seq 40); do echo line $n; sleep 0.1; done
for n in $(seq 30); do echo $n > $SYNCD_ARTIFACT_DIR/$n.txt; done
head -c 3000000 /dev/urandom > $SYNCD_ARTIFACT_DIR/large.bin
"""
'''


@pytest.fixture
def drive(tmp_path: Path) -> Iterator[FakeDrive]:
    with FakeDrive(tmp_path / "drive") as drive:
        yield drive


@pytest.fixture
def ends(drive: FakeDrive, tmp_path: Path, rclone_config: Path) -> Iterator[Ends]:
    """Both ends on the drive, no daemon started yet."""
    rclone_config.write_text(drive.section("there"))
    with pytest.MonkeyPatch.context() as patch:
        for name, value in drive.environ().items():
            patch.setenv(name, value)
        ends = Ends(tmp_path, "there:syncd", rclone_config=str(rclone_config))
        ends.serve(stages=STAGES)
        ends.new_vm()
        yield ends
        ends.close()


def test_all_arrives_once_by_a_drive_that_limits_doubles_fails_and_lags(
    ends: Ends, drive: FakeDrive
) -> None:
    drive.faults.creations_per_second = 1.5  # fewer than our pace, so that it says no
    drive.faults.lag = 2.0
    drive.faults.doubled = 0.2
    drive.faults.failed = 0.1
    for number in range(30):  # more small files than could be made one by one in time
        ends.serve(**{f"file{number}_txt": f"{number}\n"})
    ends.laptop.start()
    # A folder that is listed late, or not yet made, would be made again by an end that comes now.
    eventually(drive.names, within=60, what="the laptop does not begin")
    drive.settle()
    ends.vm.start()
    ends.append("run:talk")
    line = ends.sh("cat $SYNCD_PAYLOAD/file7.txt; echo once")
    assert ends.ended(1, 200).result is Result.SUCCESS
    assert (ends.ended(2, 200).line, ends.ended(2).result) == (line, Result.SUCCESS)

    run_id = ends.journal()[1].run_id
    made, here = (end.layout.artifacts / run_id for end in (ends.vm, ends.laptop))
    names = sorted(path.name for path in made.iterdir())
    assert len(names) == 31
    eventually(
        lambda: here.exists() and sorted(path.name for path in here.iterdir()) == names,
        within=200,
        what=lambda: ends.told(1),
    )
    assert all((here / name).read_bytes() == (made / name).read_bytes() for name in names)
    assert ends.log("talk") == (ends.vm.layout.inbox / "talk.log").read_bytes()
    assert ends.log("sh-2").count(b"once") == 2  # in the script, and what it prints
    started = Counter(r.number for r in ends.records() if r.state is State.STARTED)
    assert started == {1: 1, 2: 1}
    assert drive.answers["userRateLimitExceeded"] > 0
    assert max(Counter(drive.names()).values()) > 1
