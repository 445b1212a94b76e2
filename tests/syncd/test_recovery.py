"""Both daemons as real processes, and what they lean on taken away under them."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path

from ends import End, Ends
from waiting import eventually

from protocol.states import Result
from syncd.account import read_account
from syncd.platform import Identity

STAGES = """
[stages.talk]
command = '''
head -c 3000000 /dev/urandom > $SYNCD_ARTIFACT_DIR/large.bin
n=0
while [ ! -e $SYNCD_STORE/go ]; do n=$((n+1)); echo line $n; sleep 0.01; done
echo last'''

[stages.word]
command = "cat $SYNCD_PAYLOAD/word.txt"

[stages.fail]
command = "echo trying; exit 7"
retries = 1
"""


def start(ends: Ends) -> Ends:
    ends.serve(stages=STAGES, word_txt="first\n")
    ends.new_vm()
    ends.laptop.start()
    ends.vm.start()
    return ends


def rclone_of(end: End) -> Identity:
    """The rclone of a daemon, as it is on record."""

    def read() -> Identity | None:
        path = end.layout.private / "rclone" / "rclone.pid"
        record = json.loads(path.read_bytes()) if path.exists() else (0, "", "")
        pid, began, boot = record[:3]  # and whose it is
        found = Identity(pid, began, boot)
        return found if pid and found.alive() else None

    return eventually(read, within=30, what="there is no rclone")


def test_an_rclone_killed_under_load_is_started_again_and_nothing_is_lost(
    local_ends: Ends,
) -> None:
    ends = start(local_ends)
    ends.append("run:talk")
    ends.started(1)
    for end in (ends.vm, ends.laptop, ends.vm, ends.laptop):
        killed = rclone_of(end)
        size = len(ends.log("talk"))
        killed.signal(signal.SIGKILL)
        eventually(lambda killed=killed: not killed.alive(), what="it was not killed")
        assert rclone_of(end) != killed
        eventually(
            lambda size=size: len(ends.log("talk")) > size, within=30, what=lambda: ends.told(1)
        )
    (ends.vm.layout.store / "go").touch()
    record = ends.ended(1)
    assert (record.result, record.attempt) == (Result.SUCCESS, 1)
    there = (ends.vm.layout.inbox / "talk.log").read_bytes()
    eventually(lambda: ends.log("talk") == there, what="the log did not arrive whole")
    path = Path("in/artifacts", record.run_id, "large.bin")
    here = ends.laptop.layout.root / path
    eventually(here.exists, within=30, what="the artefact did not arrive")
    assert here.read_bytes() == (ends.vm.layout.root / path).read_bytes()
    keys = [r.key for r in ends.records()]
    assert len(keys) == len(set(keys))
    assert [end.process.poll() for end in (ends.laptop, ends.vm)] == [None, None]


def test_a_watched_folder_that_was_deleted_and_made_again_is_seen_again(local_ends: Ends) -> None:
    ends = start(local_ends)
    ends.append("run:word")
    assert ends.ended(1).result is Result.SUCCESS
    for number, word in enumerate(["second", "third"], start=2):
        shutil.rmtree(ends.laptop.layout.serve)
        ends.laptop.layout.serve.mkdir()
        ends.serve(stages=STAGES, word_txt=f"{word}\n")
        ends.append("run:word")
        assert ends.ended(number).result is Result.SUCCESS
        assert ends.log("word").splitlines()[-2] == word.encode()
    # The queue, saved the way an editor does that moves the old one away.
    queue = ends.laptop.layout.queue
    text = queue.read_text()
    os.rename(queue, queue.with_name("queue.txt~"))
    queue.write_text(text + "run:word\n")
    assert ends.ended(4).result is Result.SUCCESS


def test_why_a_run_died_can_be_read_at_the_laptop_in_one_place(local_ends: Ends) -> None:
    ends = start(local_ends)
    ends.append("run:fail")
    record = ends.ended(1)
    end = "exit 7; last line: trying"
    assert record.cause == f"gave up after 2 attempts; the last: {end}"
    eventually(lambda: ends.log("fail").count(b"[syncd] end") == 2, what="the log is not here")
    account = read_account(ends.laptop.layout, record.run_id)
    assert account is not None
    assert [(a.attempt, a.cause, a.last_lines) for a in account.attempts] == [
        (1, end, ("trying",)),
        (2, end, ("trying",)),
    ]
    status = ends.laptop.layout.status
    eventually(lambda: "gave up after 2 attempts" in status.read_text(), what=status.read_text)
    assert ends.results().runs[record.run_id].cause == record.cause
