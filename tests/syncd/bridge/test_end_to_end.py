"""A laptop with `syncd watch` and `syncd bridge`, and a worker that knows a URL, nothing else."""

from __future__ import annotations

import base64
import http.client
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from bridging import BridgeProcess
from ends import End, Ends
from servers import free_port
from waiting import eventually

from protocol.errors import ExitCode
from protocol.paths import Layout
from protocol.states import Result
from syncd.bridge import current_url, objects_folder
from syncd.view import read_commands

COUNT = """
env
for n in 1 2 3 4 5 6 7 8 9 10; do echo line $n; sleep 0.2; done
head -c 300000 /dev/urandom > $SYNCD_ARTIFACT_DIR/large.bin
"""
STAGES = '[stages.count]\ncommand = "sh count.sh"\n'


@pytest.fixture
def both(tmp_path: Path) -> Iterator[tuple[Ends, BridgeProcess]]:
    """A laptop with a bridge that runs, and a VM on its other side; no `syncd watch` yet."""
    layout = Layout(tmp_path / "laptop")
    ends = Ends(tmp_path, str(objects_folder(layout)))
    ends.serve(stages=STAGES, count_sh=COUNT)
    bridge = BridgeProcess(layout)
    bridge.start()
    # What is pasted, on a machine where nothing was set up before.
    vm = End(Layout(tmp_path / "vm"))
    vm.arguments = ["--role", "worker"]
    vm.environ = {"SYNCD_REMOTE": bridge.remote, "SYNCD_KEY": layout.key.read_text().strip()}
    ends.vms.append(vm)
    yield ends, bridge
    ends.close()
    bridge.kill()


def lines(ends: Ends) -> list[bytes]:
    return [line for line in ends.log("count").splitlines() if line.startswith(b"line ")]


WHOLE = [b"line %d" % n for n in range(1, 11)]


def test_a_stage_runs_through_a_bridge_that_is_killed_and_one_whose_server_is(both):
    ends, bridge = both
    ends.laptop.start()
    ends.vm.start()
    ends.append("run:count")
    eventually(lambda: lines(ends), within=60, what=lambda: ends.told(1))
    bridge.kill()
    bridge.start()
    before = bridge.server_pid()
    os.kill(before, signal.SIGKILL)
    assert ends.ended(1).result is Result.SUCCESS
    assert lines(ends) == WHOLE
    run_id = ends.journal()[1].run_id
    here = ends.laptop.layout.artifacts / run_id / "large.bin"
    eventually(here.exists, within=30, what="the artefact did not arrive")
    assert here.read_bytes() == (ends.vm.layout.artifacts / run_id / "large.bin").read_bytes()
    assert bridge.server_pid() != before
    assert bridge.password not in ends.vm.output.read_text()
    assert bridge.password not in bridge.log.read_text()
    assert bridge.password.encode() not in ends.log("count")
    assert ends.vm.stop() == 0


def test_a_pack_that_was_cut_in_the_middle_is_never_applied_and_is_when_it_is_whole(both):
    ends, bridge = both
    ends.laptop.start()
    ends.append("run:count")
    objects = objects_folder(ends.laptop.layout)
    eventually(lambda: read_commands(ends.laptop.layout), within=60)
    assert ends.laptop.stop() == 0  # which sends all that there is
    packs = sorted(objects.glob("c-*/*-pack-*"))
    sent, content = packs[-1], packs[-1].read_bytes()
    sent.unlink()
    path = f"/objects/{sent.parent.name}/{sent.name}"
    put_torn(bridge, path, content)
    ends.vm.start()
    eventually(lambda: "remote http://127.0.0.1" in ends.vm.output.read_text(), within=60)
    assert not ends.vm.layout.journal.exists()
    assert put(bridge, path, content) in (201, 204)
    eventually(ends.vm.layout.journal.exists, within=60, what=lambda: ends.told(1))
    ends.laptop.start()
    assert ends.ended(1).result is Result.SUCCESS
    assert lines(ends) == WHOLE


def put(bridge: BridgeProcess, path: str, content: bytes) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", bridge.port, timeout=30)
    connection.request("PUT", path, content, {"Authorization": authorization(bridge)})
    status = connection.getresponse().status
    connection.close()
    return status


def put_torn(bridge: BridgeProcess, path: str, content: bytes) -> None:
    """Send the half of what was announced, and go."""
    head = f"PUT {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n"
    head += f"Authorization: {authorization(bridge)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", bridge.port)) as connection:
        connection.sendall(head.encode() + content[: len(content) // 2])


def authorization(bridge: BridgeProcess) -> str:
    return "Basic " + base64.b64encode(f"syncd:{bridge.password}".encode()).decode()


def test_a_worker_with_a_wrong_password_ends_and_says_what_to_do(both):
    ends, bridge = both
    vm = ends.vm
    vm.environ["SYNCD_REMOTE"] = bridge.remote.replace(bridge.password, "guessed")
    vm.start()
    assert vm.wait() == ExitCode.REMOTE
    said = vm.output.read_text()
    assert "401 Unauthorized" in said
    assert "for a bridge, make a notebook's cell anew by `syncd bootstrap`" in said
    assert "paste again what `syncd bridge --show` prints" in said
    assert "guessed" not in said


def test_a_worker_that_is_given_the_new_url_goes_on_where_it_was(both):
    ends, bridge = both
    ends.serve(
        stages='[stages.wait]\ncommand = "until [ -e $SYNCD_STORE/go ]; do sleep 0.1; done"\n'
    )
    ends.laptop.start()
    ends.vm.start()
    ends.append("run:wait")
    ends.started(1)
    bridge.stop()
    bridge.port = free_port()
    bridge.start()
    assert ends.vm.stop() == 0
    ends.vm.environ["SYNCD_REMOTE"] = bridge.remote
    ends.vm.start()
    (ends.vm.layout.root / "store" / "go").touch()
    ended = ends.ended(1)
    assert (ended.result, ended.attempt) == (Result.SUCCESS, 1)


def test_watch_runs_a_bridge_beside_and_ends_it(both):
    ends, bridge = both
    assert bridge.stop() == 0
    ends.laptop.arguments = ["--bridge", "--address", f"127.0.0.1:{bridge.port}"]
    eventually(lambda: current_url(ends.laptop.layout) is None)
    ends.laptop.start()
    eventually(lambda: "controller c-" in ends.laptop.output.read_text(), within=60)
    assert current_url(ends.laptop.layout) == f"{bridge.url}/objects"
    assert "`syncd bridge --show` prints what to paste" in ends.laptop.output.read_text()
    assert bridge.password not in ends.laptop.output.read_text()
    assert ends.laptop.stop() == 0
    assert current_url(ends.laptop.layout) is None
