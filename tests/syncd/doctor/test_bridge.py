"""What `syncd doctor` says of a controller's bridge, and when a drill may end its tunnel."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest
from bridging import BridgeProcess
from doctoring import doctor
from servers import WebdavServer, free_port

from protocol.errors import ExitCode
from protocol.paths import Layout
from protocol.publish import make_dirs
from protocol.status import Status
from protocol.wire import Role
from syncd.bench.slow_link import SlowLink
from syncd.bridge import bridge_folder, objects_folder, password_file, url_file
from syncd.bridge.running import Record
from syncd.doctor.bridge import check_bridge, why_not_cut
from syncd.doctor.findings import Finding
from syncd.doctor.patient import look_at
from syncd.platform import exclusive_lock
from syncd.setup import initialise

WORKER = "w-000001-51b0c7de"


@pytest.fixture
def laptop(tmp_path: Path) -> Layout:
    layout = Layout(tmp_path / "laptop")
    initialise(layout, role=Role.CONTROLLER, remote=str(objects_folder(layout)))
    return layout


@contextlib.contextmanager
def running(layout: Layout, *arguments: str) -> Iterator[BridgeProcess]:
    bridge = BridgeProcess(layout, *arguments)
    bridge.start()
    try:
        yield bridge
    finally:
        bridge.stop()


@contextlib.contextmanager
def noted(layout: Layout, **record: object) -> Iterator[None]:
    """A bridge that is there by its lock and what it has left, and answers nowhere."""
    make_dirs(bridge_folder(layout))
    password_file(layout).write_text("a-password\n")
    with exclusive_lock(bridge_folder(layout) / "bridge.lock", "run a bridge"):
        values = {"address": f"http://127.0.0.1:{free_port()}", **record}
        made = Record(**values)  # type: ignore[arg-type]
        made.save(layout)
        url_file(layout).write_text(f"{made.url}/objects\n")
        yield


def look(layout: Layout) -> list[tuple[str, str, str]]:
    return [told(finding) for finding in check_bridge(look_at(layout.root), threading.Event())]


def told(finding: Finding) -> tuple[str, str, str]:
    return finding.check, str(finding.level), finding.told()


def test_a_bridge_that_is_needed_and_does_not_run_is_told(laptop: Layout, tmp_path: Path) -> None:
    ((check, level, text),) = look(laptop)
    assert (check, level) == ("bridge", "warning")
    assert "`syncd watch --bridge`" in text
    other = Layout(tmp_path / "other")
    (tmp_path / "remote").mkdir()
    initialise(other, role=Role.CONTROLLER, remote=str(tmp_path / "remote"))
    assert look(other) == []
    vm = Layout(tmp_path / "vm")
    initialise(vm, role=Role.WORKER, remote="https://u:p@h/objects", key_file=laptop.key)
    assert look(vm) == []


def test_a_bridge_that_runs_answers_with_its_password_and_leads_there_by_its_url(
    laptop: Layout,
) -> None:
    with running(laptop) as bridge:
        code, found = doctor(laptop.root)
        (finding,) = found["bridge"]
        assert (code, finding["level"]) == (0, "ok")
        assert f"answers at {bridge.url} with its password" in finding["found"]
        assert "tunnel" not in found  # none was asked for
        with SlowLink(bridge.port) as link:
            bridge.stop()
            program = shlex.join(
                ["sh", "-c", f"echo http://127.0.0.1:{link.port}; exec sleep 1000"]
            )
            bridge.arguments = ["--tunnel", f"command:{program}"]
            bridge.start()
            ok, (check, level, text) = look(laptop)
            assert (ok[1], check, level) == ("ok", "tunnel", "ok")
            assert f"http://127.0.0.1:{link.port} leads to the bridge" in text
            link.refuse()
            _, (check, level, text) = look(laptop)
            assert (check, level) == ("tunnel", "warning")
            assert "could not be tried from here: Connection refused" in text
        password_file(laptop).write_text("another\n")
        code, found = doctor(laptop.root)
        assert (code, found["bridge"][0]["level"]) == (ExitCode.REMOTE, "wrong")
        assert "answers 401" in found["bridge"][0]["found"]


def test_a_url_that_leads_to_another_server_is_wrong(laptop: Layout, webdav: WebdavServer) -> None:
    with running(laptop, "--url", f"http://127.0.0.1:{webdav.port}"):
        code, found = doctor(laptop.root)
    assert (code, found["tunnel"][0]["level"]) == (ExitCode.REMOTE, "wrong")
    assert "answers 401: it does not lead to this bridge" in found["tunnel"][0]["found"]


def test_a_server_that_does_not_answer_and_a_tunnel_without_a_url_are_told(laptop: Layout) -> None:
    with noted(laptop, tunnel="cloudflared", fixed=False):
        url_file(laptop).unlink()
        server, tunnel = look(laptop)
    assert server[:2] == ("bridge", "wrong")
    assert "does not answer" in server[2]
    assert tunnel[:2] == ("tunnel", "warning")
    assert "has told no URL yet" in tunnel[2]


def test_another_machines_own_port_is_no_proof_and_not_tried(laptop: Layout) -> None:
    with noted(laptop, tunnel="ssh:me@host", url="http://127.0.0.1:8766"):
        _, (check, level, text) = look(laptop)
    assert (check, level) == ("tunnel", "ok")
    assert "could not be tried from here" in text


@pytest.mark.parametrize(
    ("heard", "fallback", "warned"),
    [(300.0, False, True), (300.0, True, False), (10.0, False, False), (None, False, False)],
)
def test_a_worker_that_was_not_heard_since_the_url_changed_is_told_with_what_to_do(
    laptop: Layout, tmp_path: Path, heard: float | None, fallback: bool, warned: bool
) -> None:
    now = time.time()
    if heard is not None:
        hear(laptop, came=now - heard)
    if fallback:
        set_fallback(laptop, tmp_path)
    with noted(laptop, url="https://new.example.org", changed=now - 100):
        texts = [text for check, _, text in look(laptop) if "changed" in text]
    assert bool(texts) is warned
    for text in texts:
        assert "the worker was last heard before the URL changed" in text
        assert "`syncd bridge --show`" in text


def hear(layout: Layout, *, came: float) -> None:
    """Have it as if the worker had been heard."""
    status = asdict(Status(time=came, worker=WORKER, host="vm", sealed=True))
    (layout.private / "status.json").write_text(json.dumps({**status, "came": came}))


def set_fallback(layout: Layout, folder: Path) -> None:
    text = layout.settings.read_text("utf-8").replace("# fallback = []", f'fallback = ["{folder}"]')
    assert f'["{folder}"]' in text
    layout.settings.write_text(text)


# Whether a drill may end the tunnel


def test_a_tunnel_whose_url_stays_the_same_may_be_ended(laptop: Layout) -> None:
    with noted(laptop, tunnel="cloudflared:mine", fixed=True, url="https://gpu.example.org"):
        assert why_not_cut(laptop) == ""


def test_another_tunnel_may_be_ended_once_the_worker_is_seen_on_a_second_remote(
    laptop: Layout, tmp_path: Path
) -> None:
    second = tmp_path / "second"
    second.mkdir()
    with noted(laptop, tunnel="cloudflared", fixed=False, url="https://a.trycloudflare.com"):
        assert "another URL" in why_not_cut(laptop)
        hear(laptop, came=time.time())
        assert "another URL" in why_not_cut(laptop)
        set_fallback(laptop, second)
        assert "another URL" in why_not_cut(laptop)
        (second / WORKER).mkdir()
        assert why_not_cut(laptop) == ""


def test_the_drill_spares_a_tunnel_whose_url_would_be_another_one(laptop: Layout) -> None:
    program = f"{shlex.quote(sys.executable)} -c 'import time; time.sleep(1000)'"
    with running(laptop) as bridge:
        bridge.stop()
        with SlowLink(bridge.port) as link:
            url = f"http://127.0.0.1:{link.port}"
            bridge.arguments = ["--tunnel", f'command:sh -c "echo {url}; exec {program}"']
            bridge.start()
            tunnel = bridge_folder(laptop) / "tunnel.pid"
            before = tunnel.read_bytes()
            done = subprocess.run(
                [sys.executable, "-c", ONLY_THE_BRIDGE, str(laptop.root)],
                env={k: v for k, v in os.environ.items() if not k.startswith("SYNCD_")},
                capture_output=True,
                text=True,
            )
            assert "skipped  bridge cut" in done.stdout, done.stderr
            assert "the tunnel would come back with another URL" in done.stdout
            assert done.returncode == 0
            assert tunnel.read_bytes() == before


ONLY_THE_BRIDGE = """
import sys
from syncd.cli import main
from syncd.doctor import drill, own_pair
own_pair.HEARD_SECONDS = 0.1
drill.DRILLS = [each for each in drill.DRILLS if each.name == "bridge cut"]
sys.exit(main(["doctor", "--drill", "--yes", "-C", sys.argv[1]]))
"""
