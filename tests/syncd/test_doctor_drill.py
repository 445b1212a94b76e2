"""`syncd doctor --drill`: on real pairs, and whether it sees it when what must hold does not."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from ends import Ends
from servers import free_port
from waiting import eventually

from protocol.errors import ExitCode
from protocol.journal import JournalRecord
from protocol.logs import LogEnd, LogStart
from protocol.paths import Layout
from protocol.states import Result, State
from protocol.wire import Role
from syncd.bridge import USER, bridge_folder, current_url, objects_folder
from syncd.cli import main
from syncd.doctor import drill as drill_module
from syncd.doctor import own_pair as own_pair_module
from syncd.doctor.drill import Verdict, do_drills
from syncd.doctor.drills import DRILLS, Drill
from syncd.doctor.own_pair import LOCK, own_pair
from syncd.doctor.scene import DrillError, Proof, Scene, SkippedError, check_log
from syncd.platform import exclusive_lock
from syncd.setup import initialise
from syncd.view import is_watched
from syncd.watching import Watch

NEEDS_NO_WORKER = {"daemon killed", "rclone killed"}


def test_the_drills_pass_on_a_pair_that_is_at_work(
    local_ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first ones; all of them are the long form's."""
    local_ends.new_vm().start()
    monkeypatch.setattr(drill_module, "DRILLS", DRILLS[:3])
    with own_pair(local_ends.laptop.layout) as scene:
        outcomes = list(do_drills(scene))
    assert [(each.verdict, each.why) for each in outcomes] == [(Verdict.PASSED, "")] * 3
    assert not is_watched(local_ends.laptop.layout)


def test_without_its_worker_a_laptop_does_the_drills_that_need_none(
    local_ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own_pair_module, "HEARD_SECONDS", 0.5)
    before = local_ends.laptop.layout.queue.read_bytes()
    with own_pair(local_ends.laptop.layout) as scene:
        outcomes = {each.drill: each for each in do_drills(scene)}
    passed = {name for name, each in outcomes.items() if each.verdict is Verdict.PASSED}
    assert passed == NEEDS_NO_WORKER
    assert all(outcomes[name].why.startswith("it came back") for name in passed)
    assert outcomes["there and back"].verdict is Verdict.SKIPPED
    assert "never heard of" in outcomes["there and back"].why
    assert local_ends.laptop.layout.queue.read_bytes() == before


def test_a_daemon_of_the_person_s_own_is_not_killed(local_ends: Ends, capsys) -> None:
    layout = local_ends.laptop.layout
    local_ends.laptop.start()
    eventually(lambda: is_watched(layout), within=60)
    assert main(["doctor", "--drill", "--yes", "-C", str(layout.root)]) == ExitCode.BUSY
    assert "Stop it" in capsys.readouterr().err
    assert local_ends.laptop.process is not None
    assert local_ends.laptop.process.poll() is None


def test_nothing_is_done_before_it_is_agreed_to(
    local_ends: Ends, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    with open("/dev/null") as nobody:
        monkeypatch.setattr(sys, "stdin", nobody)
        root = local_ends.laptop.layout.root
        assert main(["doctor", "--drill", "-C", str(root)]) == ExitCode.USAGE
    told = capsys.readouterr().err
    assert "kills and stalls" in told
    assert "A tunnel whose URL would be another one then is spared" in told
    assert not (local_ends.laptop.layout.private / "drill.log").exists()


def test_a_worker_s_end_is_told_where_to_do_it(local_ends: Ends, capsys) -> None:
    vm = local_ends.new_vm().layout
    assert main(["doctor", "--drill", "--yes", "-C", str(vm.root)]) == ExitCode.USAGE
    assert "--local" in capsys.readouterr().err
    assert main(["doctor", "--local"]) == ExitCode.USAGE


def test_which_lines_it_appended_and_that_they_stay_is_told(
    local_ends: Ends, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    local_ends.new_vm().start()
    layout = local_ends.laptop.layout
    monkeypatch.setattr(drill_module, "DRILLS", DRILLS[:1])
    assert main(["doctor", "--drill", "--yes", "-C", str(layout.root)]) == 0
    told = capsys.readouterr()
    assert told.out.splitlines()[-1] == "none failed"
    assert "where they stay, since a queue is only added to" in told.err
    assert re.search(r"^ +1  sh: .*  sh\.0001\.\w+  success$", told.err, re.MULTILINE)
    assert "has not ended" not in told.err


def test_a_second_drill_in_a_folder_is_refused_from_the_first_ones_begin_to_its_end(
    local_ends: Ends, capsys: pytest.CaptureFixture[str]
) -> None:
    layout = local_ends.laptop.layout
    with exclusive_lock(layout.private / LOCK, "a drill"):
        code = main(["doctor", "--drill", "--yes", "-C", str(layout.root)])
    assert code == ExitCode.BUSY
    assert "drill.lock" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (signal.SIGTERM, ExitCode.INTERRUPTED),
        (signal.SIGINT, ExitCode.INTERRUPTED),
        (signal.SIGKILL, -signal.SIGKILL),
    ],
)
def test_a_drill_that_is_ended_leaves_no_daemon_and_says_what_it_waits_for(
    number: int, code: int, local_ends: Ends
) -> None:
    layout, progress = local_ends.laptop.layout, local_ends.folder / "progress"
    command = [sys.executable, "-m", "syncd", "doctor", "--drill", "--yes", "-C", str(layout.root)]
    with open(progress, "wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
    waits = b"waiting for the worker's heartbeat, 45 s at most"
    eventually(lambda: waits in progress.read_bytes(), within=60)
    eventually(lambda: is_watched(layout))
    process.send_signal(number)
    assert process.wait(60) == code
    eventually(lambda: not is_watched(layout), what="its `syncd watch` lives on")


@pytest.mark.long
def test_every_drill_passes_on_a_scratch_pair() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "syncd", "doctor", "--drill", "--local", "--json"],
        capture_output=True,
        timeout=280,
    )
    outcomes = json.loads(done.stdout)
    assert done.returncode == 0, done.stderr
    verdicts = {each["drill"]: each["verdict"] for each in outcomes}
    assert verdicts.pop("bridge cut") == "skipped"
    assert set(verdicts.values()) == {"passed"}
    assert len(verdicts) == len(DRILLS) - 1


@pytest.mark.long
def test_a_bridge_that_is_cut_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    laptop = Layout(tmp_path / "laptop")
    initialise(laptop, role=Role.CONTROLLER, remote=str(objects_folder(laptop)))
    bridge = [sys.executable, "-m", "syncd", "bridge", "-C", str(laptop.root)]
    process = subprocess.Popen(
        [*bridge, "--address", f"127.0.0.1:{free_port()}"], stdout=subprocess.DEVNULL
    )
    try:
        eventually(lambda: current_url(laptop), within=60, what="the bridge did not come up")
        login = f"{USER}:{(bridge_folder(laptop) / 'password').read_text().strip()}@"
        remote = str(current_url(laptop)).replace("//", f"//{login}")
        vm = Layout(tmp_path / "vm")
        initialise(vm, role=Role.WORKER, remote=remote, key_file=laptop.key)
        drills = [drill for drill in DRILLS if drill.name == "bridge cut"]
        monkeypatch.setattr(drill_module, "DRILLS", drills)
        with Watch(vm, tmp_path / "output").running(), own_pair(laptop) as scene:
            (outcome,) = do_drills(scene)
        assert (outcome.verdict, outcome.why) == (Verdict.PASSED, "")
    finally:
        process.terminate()
        process.wait()


# Whether a drill sees it


START = LogStart(run_id="sh.0001.abcd", attempt=1, time=1.0, command="c")
END = LogEnd(run_id="sh.0001.abcd", attempt=1, time=2.0, seconds=1.0, result=Result.SUCCESS)


@pytest.mark.parametrize(
    ("lines", "sound"),
    [
        ([1, 2, 3], True),
        ([1, 3], False),
        ([1, 2, 2, 3], False),
        ([2, 1, 3], False),
        ([1, 2, 3, 1, 2, 3], False),
        ([], False),
    ],
)
def test_a_log_that_is_not_whole_is_seen(lines: list[int], sound: bool, tmp_path: Path) -> None:
    path = tmp_path / "sh-1.log"
    said = b"".join(b"nonce %d\n" % n for n in lines)
    path.write_bytes(START.line() + said + END.line())
    assert_sound(path, sound)
    path.write_bytes(START.line() + said)
    assert_sound(path, False)
    path.write_bytes(said + END.line())
    assert_sound(path, False)


def assert_sound(path: Path, sound: bool) -> None:
    if sound:
        check_log(path, "nonce", 3)
    else:
        with pytest.raises(DrillError, match=r"sh-1\.log"):
            check_log(path, "nonce", 3)


def record(proof: Proof, state: State, attempt: int = 1, **more: object) -> JournalRecord:
    return JournalRecord(
        number=1,
        line=proof.line,
        state=state,
        time=1.0,
        worker="w-000001-51b0c7de",
        run_id="sh.0001.abcd",
        attempt=attempt if state is not State.CLAIMED else 0,
        **more,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("result", [Result.SUCCESS, Result.LOST])
@pytest.mark.parametrize("attempts", [1, 2])
def test_a_command_that_ran_twice_or_did_not_succeed_is_seen(
    result: Result, attempts: int, tmp_path: Path
) -> None:
    proof = Proof(nonce="nonce", lines=3)
    layout = Layout(tmp_path)
    layout.inbox.mkdir()
    records = [
        record(proof, State.CLAIMED),
        *(record(proof, State.STARTED, n + 1) for n in range(attempts)),
        record(proof, State.ENDED, attempts, result=result, cause="because"),
    ]
    layout.journal.write_bytes(b"".join(each.encode() for each in records))
    said = b"".join(b"nonce %d\n" % n for n in (1, 2, 3))
    layout.shell_log(1).write_bytes(START.line() + said + END.line())
    scene = Scene(Watch(layout, tmp_path / "output"))
    if (result, attempts) == (Result.SUCCESS, 1):
        proof.verify(scene)
    else:
        with pytest.raises(DrillError, match="because" if result is Result.LOST else "once"):
            proof.verify(scene)


def test_a_drill_that_fails_keeps_none_from_being_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(scene: Scene) -> None:
        raise DrillError("it does not hold")

    def skips(scene: Scene) -> None:
        raise SkippedError("not here")

    def breaks(scene: Scene) -> None:
        raise OSError("no disk")

    drills = [Drill(f.__name__, "all", f) for f in (fails, skips, breaks)]
    drills.append(Drill("passes", "all", lambda scene: None))
    monkeypatch.setattr(drill_module, "DRILLS", drills)
    scene = Scene(Watch(Layout(tmp_path), tmp_path / "output"))
    assert [(each.verdict, each.why) for each in do_drills(scene)] == [
        (Verdict.FAILED, "it does not hold"),
        (Verdict.SKIPPED, "not here"),
        (Verdict.FAILED, "no disk"),
        (Verdict.PASSED, ""),
    ]


def test_what_became_of_the_lines_that_were_appended_is_known(local_ends: Ends) -> None:
    layout = local_ends.laptop.layout
    scene = Scene(Watch(layout, local_ends.folder / "output"))
    first, second = Proof(), Proof()
    with scene.watch.running():
        first.append(scene)
        eventually(lambda: scene.became()[first.line], within=60)
    second.append(scene)
    views = scene.became()
    assert [views[first.line].state, views[second.line]] == [State.QUEUED, None]  # type: ignore[union-attr]
