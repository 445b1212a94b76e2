"""Both daemons as real processes: what a person at the laptop does, and what comes back."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from ends import Ends, processes_of
from servers import WebdavServer
from waiting import eventually

from protocol.errors import ExitCode
from protocol.logs import LogEnd, LogStart, parse_log_line
from protocol.states import Result, State

STAGES = '''
[stages.count]
command = "sh count.sh"
gpu = 0.5

[stages.after]
command = "cat $SYNCD_PAYLOAD/word.txt; echo $SYNCD_AFTER"
after = ["count"]
gpu = 0

[stages.wait]
command = """
echo $$ >> $SYNCD_STORE/pids
while [ ! -e $SYNCD_STORE/go ]; do sleep 0.05; done
echo went"""
gpu = 0.5

[stages.fail]
command = "echo trying; exit 7"
retries = 1
'''
COUNT = """
for n in 1 2 3; do echo line $n; done
echo some bytes > $SYNCD_ARTIFACT_DIR/made.txt
head -c 300000 /dev/urandom > $SYNCD_ARTIFACT_DIR/large.bin
printf '{"run_id": "%s", "stage": "count", "metrics": {"n": 3}}' $SYNCD_RUN_ID > $SYNCD_RESULT_FILE
"""


def start(ends: Ends) -> Ends:
    ends.serve(stages=STAGES, count_sh=COUNT, word_txt="first\n")
    ends.new_vm()
    ends.laptop.start()
    ends.vm.start()
    return ends


def test_a_line_in_the_queue_becomes_a_log_a_result_and_files(ends: Ends) -> None:
    start(ends)
    ends.append("run:count", "run:after", "run:nope", "no such command", "run:fail")
    assert ends.ended(1).result is Result.SUCCESS
    assert ends.ended(2).result is Result.SUCCESS
    unknown, malformed, failed = ends.ended(3), ends.ended(4), ends.ended(5)
    assert unknown.result is Result.REFUSED
    assert "'nope'" in unknown.cause
    assert malformed.result is Result.REFUSED
    assert "line " in malformed.cause
    assert (failed.result, failed.exit_code, failed.attempt) == (Result.FAILED, 7, 2)

    run_id = ends.journal()[1].run_id
    lines = ends.log("count").splitlines()
    first, last = parse_log_line(lines[0]), parse_log_line(lines[-1])
    assert isinstance(first, LogStart)
    assert first.command == "sh count.sh"
    assert isinstance(last, LogEnd)
    assert (last.run_id, last.result) == (run_id, Result.SUCCESS)
    assert lines[1:-1] == [b"line 1", b"line 2", b"line 3"]
    assert f'first\n{{"count": "{run_id}"}}'.encode() in ends.log("after")

    assert ends.results().find(run_id, "count").metrics == {"n": 3}
    made = ends.laptop.layout.artifacts / run_id
    eventually((made / "large.bin").exists, what="a large artefact did not arrive")
    eventually((made / "made.txt").exists, what="a small artefact did not arrive")
    there = ends.vm.layout.artifacts / run_id / "large.bin"
    assert (made / "large.bin").read_bytes() == there.read_bytes()
    assert "run:count" in ends.laptop.layout.status.read_text()
    for state in (State.CLAIMED, State.STARTED, State.ENDED):
        assert sum(r.number == 1 and r.state is state for r in ends.records()) == 1


def test_a_run_uses_the_script_as_it_was_when_the_line_was_appended(local_ends: Ends) -> None:
    ends = start(local_ends)
    ends.append("run:count")
    ends.ended(1)
    for number, word in enumerate(["second", "third", "fourth"], start=2):
        ends.serve(word_txt=f"{word}\n")
        ends.append("run:after")
        ends.ended(number)
        assert ends.log("after").splitlines()[-3] == word.encode()


def test_a_killed_daemon_finds_its_stage_again_and_loses_nothing(ends: Ends) -> None:
    start(ends)
    ends.append("run:wait")
    ends.started(1)
    pids = ends.vm.layout.store / "pids"
    eventually(pids.exists, what="the stage did not start")
    for _ in range(3):
        ends.vm.kill()
        ends.laptop.kill()
        ends.vm.start()
        ends.laptop.start()
    ends.append("run:count")
    ends.ended(2)
    (ends.vm.layout.store / "go").touch()
    record = ends.ended(1)
    assert (record.result, record.exit_code, record.attempt) == (Result.SUCCESS, 0, 1)
    assert len(pids.read_text().split()) == 1
    assert b"\nwent\n" in ends.log("wait")
    assert ends.log("wait") == (ends.vm.layout.inbox / "wait.log").read_bytes()
    keys = [r.key for r in ends.records()]
    assert len(keys) == len(set(keys))


def test_a_stage_ends_while_its_daemon_is_dead(local_ends: Ends) -> None:
    ends = start(local_ends)
    ends.append("run:wait")
    ends.started(1)
    ends.vm.kill()
    (ends.vm.layout.store / "go").touch()
    eventually(lambda: not list(processes_of(ends.vm.layout)), what="the stage did not end")
    ends.vm.start()
    assert ends.ended(1).result is Result.SUCCESS
    assert b"\nwent\n" in ends.log("wait")


def test_stop_ends_the_run_and_what_waits_behind_it(local_ends: Ends) -> None:
    ends = start(local_ends)
    ends.append("run:wait", "run:wait")
    ends.started(1)
    ends.append("stop:wait")
    assert ends.ended(3).result is Result.SUCCESS
    assert [ends.ended(n).result for n in (1, 2)] == [Result.STOPPED, Result.STOPPED]
    assert not list(processes_of(ends.vm.layout))


def test_a_new_vm_goes_on_where_the_lost_one_was(ends: Ends) -> None:
    start(ends)
    ends.append("run:count", "run:wait")
    ends.ended(1)
    line = ends.sh("sleep 1000")
    ends.append("run:after")
    ends.started(2)
    ends.started(3)
    ends.ended(4)
    ends.lose_vm()
    ends.new_vm().start()
    lost = ends.ended(3)
    assert (lost.line, lost.result) == (line, Result.LOST)
    (ends.vm.layout.store / "go").touch()
    resumed = ends.ended(2)
    assert (resumed.result, resumed.attempt) == (Result.SUCCESS, 2)
    told = f"\n[syncd] {resumed.run_id} attempt 1 was cut off: VM gone: w-000001-"
    eventually(lambda: told in ends.laptop.layout.log("wait").read_text())
    ends.append("run:after")
    assert ends.ended(5).result is Result.SUCCESS
    assert sum(r.number == 1 and r.state is State.STARTED for r in ends.records()) == 1
    run_id = ends.journal()[1].run_id
    assert (ends.vm.layout.artifacts / run_id / "large.bin").exists()


def test_a_worker_that_was_replaced_stops_its_stages_and_says_why(local_ends: Ends) -> None:
    ends = start(local_ends)
    ends.append("run:wait")
    ends.started(1)
    old = ends.vm
    ends.new_vm().start()
    assert old.wait() == ExitCode.REFUSED
    assert "has taken over" in old.output.read_text()
    assert not list(processes_of(old.layout))
    (ends.vm.layout.store / "go").touch()
    record = ends.ended(1)
    assert (record.result, record.worker) == (Result.SUCCESS, ends.status()["worker"])


def test_a_dead_worker_that_was_replaced_stops_its_stages_when_it_comes_back(
    local_ends: Ends,
) -> None:
    ends = start(local_ends)
    ends.append("run:wait")
    ends.started(1)
    old = ends.vm
    old.kill()
    assert list(processes_of(old.layout))
    ends.new_vm().start()
    eventually(lambda: ends.status().get("worker") != "", what="no status")
    eventually(lambda: ends.journal()[1].attempt == 2, within=30, what=lambda: ends.told(1))
    old.start()
    assert old.wait() == ExitCode.REFUSED
    assert not list(processes_of(old.layout))
    (ends.vm.layout.store / "go").touch()
    assert ends.ended(1).result is Result.SUCCESS


def test_nothing_is_run_that_another_key_has_sealed(local_ends: Ends) -> None:
    ends = local_ends
    ends.serve(stages=STAGES, count_sh=COUNT)
    ends.new_vm()
    ends.vm.layout.key.unlink()
    stranger = Ends(ends.folder / "stranger", ends.remote)
    stranger.serve(stages=STAGES, count_sh=COUNT)
    ends.vm.layout.key.write_bytes(stranger.laptop.layout.key.read_bytes())
    ends.laptop.start()
    ends.vm.start()
    ends.append("run:count")
    eventually(
        lambda: "seal" in ends.vm.output.read_text() or "belongs to another" in _status(ends),
        what=lambda: ends.told(1),
    )
    assert not list(ends.vm.layout.runs.iterdir())


def _status(ends: Ends) -> str:
    path = ends.vm.layout.status
    return path.read_text() if path.exists() else ""


def test_a_log_that_cannot_be_read_is_named_in_the_status_and_the_rest_goes_on(
    local_ends: Ends,
) -> None:
    ends = start(local_ends)
    (ends.vm.layout.inbox / "odd.log").mkdir()
    ends.append("run:count")
    assert ends.ended(1).result is Result.SUCCESS
    told = "in/odd.log: left out: a link, or no regular file"
    eventually(lambda: told in ends.laptop.layout.status.read_text(), what=lambda: ends.told(1))


def test_two_daemons_of_one_folder_are_refused(local_ends: Ends) -> None:
    ends = start(local_ends)
    ends.append("run:count")
    ends.ended(1)
    command = [sys.executable, "-m", "syncd", "watch", "-C", str(ends.vm.layout.root)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == ExitCode.BUSY
    assert "Traceback" not in done.stderr


def test_a_daemon_that_is_asked_to_end_says_so_and_leaves_its_stages_alone(
    local_ends: Ends,
) -> None:
    ends = start(local_ends)
    ends.append("run:wait")
    ends.started(1)
    sent = list((ends.folder / "remote").glob("w-*/*"))
    assert ends.vm.stop() == ExitCode.OK
    assert len(list((ends.folder / "remote").glob("w-*/*"))) <= len(sent) + 10
    eventually(lambda: ends.status().get("leaving"), what="the worker did not say that it left")
    assert "goes on" in ends.status()["leaving"]
    assert list(processes_of(ends.vm.layout))
    ends.vm.start()
    (ends.vm.layout.store / "go").touch()
    assert ends.ended(1).result is Result.SUCCESS


def test_progress_reaches_the_laptop_while_the_stage_runs(local_ends: Ends) -> None:
    ends = local_ends
    ends.serve(
        stages="""
[stages.train]
command = '''
printf '{"step": 3, "total": 12, "unit": "epoch", "message": "loss 0.5"}' > $SYNCD_PROGRESS_FILE.new
mv $SYNCD_PROGRESS_FILE.new $SYNCD_PROGRESS_FILE
echo training
while [ ! -e $SYNCD_STORE/go ]; do sleep 0.05; done'''
"""
    )
    ends.new_vm()
    ends.laptop.start()
    ends.vm.start()
    ends.append("run:train")
    text = ends.laptop.layout.status
    eventually(
        lambda: (
            text.exists()
            and "25%  3/12 epoch  loss 0.5" in text.read_text()
            and "training" in text.read_text()
        ),
        within=60,
        what=lambda: ends.told(1),
    )
    # The JSON form is written after the text.
    eventually(
        lambda: [(run["progress"] or {}).get("step") for run in ends.status()["running"]] == [3],
        what="the status has no JSON form",
    )
    (ends.vm.layout.store / "go").touch()
    assert ends.ended(1).result is Result.SUCCESS


def test_a_worker_that_is_started_again_without_its_remote_goes_on_with_what_it_has(
    webdav: WebdavServer, tmp_path: Path, rclone_config: Path
) -> None:
    rclone_config.write_text(webdav.section("there"))
    ends = Ends(tmp_path, "there:", rclone_config=str(rclone_config))
    try:
        start(ends)
        ends.append("run:wait", "run:count")
        ends.started(1)
        ends.ended(2)
        ends.vm.kill()
        webdav.kill()
        ends.vm.start()
        status = ends.vm.layout.status
        eventually(
            lambda: "PROBLEM" in status.read_text() and "wait.0001" in status.read_text(),
            within=30,
            what=lambda: ends.told(1),
        )
        (ends.vm.layout.store / "go").touch()
        there = ends.vm.layout.journal
        eventually(lambda: b'"wait' in there.read_bytes().splitlines()[-1], within=30)
        webdav.start()
        assert ends.ended(1, seconds=90).result is Result.SUCCESS
    finally:
        ends.close()
