"""Both real daemons, on two hosts with a network between them that is slow or not there at all."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from ends import Ends
from netns import Network, NetworkWebdav
from waiting import eventually

from protocol.states import Result, State

STAGES = '''
[stages.talk]
command = """
n=0
while [ ! -e $SYNCD_STORE/go ]; do n=$((n + 1)); echo line $n; sleep 0.05; done
head -c 400000 /dev/urandom > $SYNCD_ARTIFACT_DIR/large.bin
"""
'''
# How long the link is away, in seconds: longer than a call is waited for, and a minute.
AWAY = [12, pytest.param(60, marks=pytest.mark.long)]


@pytest.fixture
def network() -> Iterator[Network]:
    with Network() as network:
        network.limit("10mbit")
        yield network


@pytest.fixture
def apart(network: Network, tmp_path: Path, rclone_config: Path) -> Iterator[Ends]:
    """Both ends, each on a host of its own, over a WebDAV server on the laptop."""
    server = NetworkWebdav(tmp_path / "server", network)
    server.start()
    rclone_config.write_text(server.section("there"))
    ends = Ends(tmp_path, server.fs("there"), rclone_config=str(rclone_config))
    ends.serve(stages=STAGES)
    ends.new_vm()
    ends.laptop.prefix, ends.vm.prefix = network.laptop.prefix, network.vm.prefix
    ends.laptop.start()
    ends.vm.start()
    yield ends
    ends.close()
    server.kill()


def told_at_the_vm(ends: Ends) -> str:
    path = ends.vm.layout.status
    return path.read_text() if path.exists() else ""


def grows(ends: Ends) -> None:
    """Wait until the laptop has more of the log than it has now."""
    size = len(ends.log("talk"))
    eventually(lambda: len(ends.log("talk")) > size, within=120, what=lambda: ends.told(1))


@pytest.mark.parametrize("seconds", AWAY)
@pytest.mark.parametrize("way", ["unplugged", "packets vanish"])
def test_a_link_that_is_away_for_a_while_costs_nothing_but_time(
    apart: Ends, network: Network, way: str, seconds: float, record_property: pytest.RecordProperty
) -> None:
    ends = apart
    ends.append("run:talk")
    grows(ends)

    began = time.monotonic()
    network.unplug() if way == "unplugged" else network.lose_all()
    eventually(
        lambda: "Nobody answers there: is this machine online" in told_at_the_vm(ends),
        within=60,
        what=lambda: f"the VM does not say what is wrong:\n{told_at_the_vm(ends)}",
    )
    line = ends.sh("echo said meanwhile")
    eventually(lambda: time.monotonic() - began > seconds, within=2 * seconds)
    network.plug_in() if way == "unplugged" else network.limit("10mbit")

    back = time.monotonic()
    grows(ends)
    record_property("seconds until the log went on", round(time.monotonic() - back, 1))
    eventually(
        lambda: "Nobody answers" not in told_at_the_vm(ends),
        within=60,
        what=lambda: f"what was wrong is still told:\n{told_at_the_vm(ends)}",
    )
    (ends.vm.layout.store / "go").touch()
    assert ends.ended(1).result is Result.SUCCESS
    assert (ends.ended(2).line, ends.ended(2).result) == (line, Result.SUCCESS)
    check_all_arrived_once(ends)


def check_all_arrived_once(ends: Ends) -> None:
    run_id = ends.journal()[1].run_id
    made, here = (end.layout.artifacts / run_id / "large.bin" for end in (ends.vm, ends.laptop))
    eventually(here.exists, within=60, what="the artefact did not arrive")
    assert here.read_bytes() == made.read_bytes()
    assert ends.log("talk") == (ends.vm.layout.inbox / "talk.log").read_bytes()
    numbers = [line for line in ends.log("talk").split(b"\n") if line.startswith(b"line ")]
    assert numbers == [b"line %d" % n for n in range(1, len(numbers) + 1)]
    assert b"\nsaid meanwhile\n" in ends.log("sh-2")
    keys = [record.key for record in ends.records()]
    assert len(keys) == len(set(keys))
    for number in (1, 2):
        started = [r for r in ends.records() if r.number == number and r.state is State.STARTED]
        assert len(started) == 1
