"""A bridge and another remote beside it, with real daemons: the tunnel goes away, and moves."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from bridging import BridgeProcess
from ends import End, Ends
from servers import WebdavServer
from waiting import eventually

from protocol.journal import fold, parse_journal
from protocol.paths import Layout
from protocol.states import Result
from syncd.bench.slow_link import SlowLink
from syncd.bridge import objects_folder
from syncd.bridge.told import worker_remote

STAGES = """
[stages.count]
command = "for n in 1 2 3; do echo line $n; sleep 0.3; done; echo made > $SYNCD_ARTIFACT_DIR/made"
"""


class TwoRemotes:
    """A laptop with a bridge, a WebDAV server beside, and a worker that reaches both."""

    def __init__(self, folder: Path) -> None:
        self.server = WebdavServer(folder / "other")
        self.server.start()
        config = folder / "rclone.conf"
        config.write_text(self.server.section("other"))
        layout = Layout(folder / "laptop")
        self.ends = Ends(folder, str(objects_folder(layout)), rclone_config=str(config))
        self.ends.serve(stages=STAGES)
        self.ends.laptop.environ = {"SYNCD_FALLBACK": "other:"}
        self.bridge = BridgeProcess(layout)
        self.new_tunnel()
        self.vm = End(Layout(folder / "vm"))
        self.vm.arguments = ["--role", "worker", "--fallback", "other:"]
        self.ends.vms.append(self.vm)
        self.config = config
        self.vm.environ = {
            "SYNCD_REMOTE": worker_remote(self.url(), self.bridge.password),
            "SYNCD_RCLONE_CONFIG": str(config),
            "SYNCD_KEY": layout.key.read_text().strip(),
        }

    def new_tunnel(self) -> None:
        """Start the bridge with a tunnel in place of the one before, at another URL."""
        self.bridge.kill()
        self.tunnel = SlowLink(self.bridge.port)
        self.tunnel.__enter__()
        self.bridge.arguments = ["--url", self.url()]
        self.bridge.start()

    def url(self) -> str:
        return f"http://127.0.0.1:{self.tunnel.port}"

    def close(self) -> None:
        self.ends.close()
        self.bridge.kill()
        self.server.kill()
        self.tunnel.__exit__(None, None, None)


@pytest.fixture
def two(tmp_path: Path) -> Iterator[TwoRemotes]:
    two = TwoRemotes(tmp_path)
    yield two
    two.close()


def run(two: TwoRemotes, number: int) -> None:
    two.ends.append("run:count")
    assert two.ends.ended(number).result is Result.SUCCESS
    made = two.ends.laptop.layout.artifacts / two.ends.journal()[number].run_id / "made"
    eventually(made.exists, within=60, what="the artefact did not arrive")
    assert two.ends.log("count").count(b"line 3\n") == number


def test_a_worker_whose_tunnel_ends_goes_on_by_the_other_remote_and_finds_the_new_url(two):
    two.ends.laptop.start()
    two.vm.start()
    run(two, 1)
    two.tunnel.__exit__(None, None, None)
    run(two, 2)

    two.new_tunnel()
    eventually(lambda: two.tunnel.requests > 3, within=90, what=two.vm.output.read_text)
    run(two, 3)

    assert two.vm.stop() == 0  # and one that is started with the old URL finds it as well
    before = two.tunnel.requests
    two.vm.start()
    eventually(lambda: two.tunnel.requests > before + 3, within=90, what=two.vm.output.read_text)
    run(two, 4)
    assert two.bridge.password not in two.vm.output.read_text()


def test_a_new_worker_goes_on_from_the_other_remote_while_the_laptop_is_off(two):
    two.ends.laptop.start()
    two.vm.start()
    run(two, 1)
    two.ends.append("run:count")
    two.ends.started(2)
    # What the laptop said is on the other remote as well before it goes.
    eventually(lambda: two.ends.status().get("ended"), within=30)
    packs = {path.name for path in objects_folder(two.ends.laptop.layout).glob("c-*/*")}
    root = two.server.root
    eventually(lambda: packs <= {path.name for path in root.glob("c-*/*")}, within=60)
    two.ends.laptop.kill()
    two.bridge.kill()
    two.ends.lose_vm()

    new = End(Layout(two.vm.layout.root.with_name("vm2")))
    new.arguments, new.environ = two.vm.arguments, two.vm.environ
    two.ends.vms.append(new)
    new.start()

    def ended() -> bool:
        path = new.layout.journal
        record = fold(parse_journal(path.read_bytes())[0]).get(2) if path.exists() else None
        return record is not None and record.result is Result.SUCCESS

    eventually(ended, within=90, what=new.output.read_text)
    two.bridge.start()
    two.ends.laptop.start()
    assert two.ends.ended(2, seconds=120).result is Result.SUCCESS
    assert two.ends.journal()[1].result is Result.SUCCESS


def test_ends_start_again_while_the_other_remote_wants_a_person(two):
    ends = (two.ends.laptop, two.vm)
    for end in ends:
        end.start()
    run(two, 1)
    for end in ends:
        assert end.stop() == 0
    config = two.config.read_text()
    two.config.write_text("")  # a Drive whose token has expired, say: no trying again helps
    for end in ends:
        end.start()
    run(two, 2)
    assert "other:" in two.vm.output.read_text()
    two.config.write_text(config)


def test_a_bridge_that_stands_still_keeps_no_stage_waiting(two):
    two.ends.laptop.start()
    two.vm.start()
    run(two, 1)
    server = two.bridge.server_pid()
    os.kill(server, signal.SIGSTOP)
    try:
        run(two, 2)
    finally:
        os.kill(server, signal.SIGCONT)
