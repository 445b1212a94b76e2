"""Cloudflare's tunnels, by a stand-in for cloudflared that prints what the real one prints."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import cloudflared_stand_in
import pytest
from waiting import eventually

from protocol.errors import UsageError
from syncd.bridge.cloudflared import NamedTunnel, QuickTunnel
from syncd.bridge.tunnel import Tunnel, TunnelProcess

TARGET = "http://127.0.0.1:8766"
pytestmark = pytest.mark.usefixtures("quick_retries")


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Callable[[Tunnel | None], tuple[TunnelProcess, list[str]]]]:
    """Return a function that keeps a tunnel running, and collects the URLs that it tells."""
    running: list[TunnelProcess] = []

    def start(tunnel: Tunnel | None = None) -> tuple[TunnelProcess, list[str]]:
        told: list[str] = []
        process = TunnelProcess(
            tmp_path / "run", tunnel or QuickTunnel(TARGET, tmp_path / "run"), told.append
        )
        process.start()
        running.append(process)
        return process, told

    yield start
    for process in running:
        process.close()


def url(name: str) -> str:
    return f"https://{name}.trycloudflare.com"


def starts(folder: Path) -> list[list[str]]:
    return [json.loads(line) for line in (folder / "starts").read_text().splitlines()]


@pytest.mark.parametrize("kind", ["", "json ", "metrics "])
def test_a_quick_tunnel_tells_its_url_however_it_is_said(cloudflared, run, kind):
    (cloudflared / "plan").write_text(f"{kind}four-dashed-word-url\n")
    _, told = run()
    eventually(lambda: told, within=30)
    assert told == [url("four-dashed-word-url")]


def test_the_users_own_configuration_is_kept_out_of_a_quick_tunnel(cloudflared, run, tmp_path):
    (cloudflared / "plan").write_text("a-b-c\n")
    _, told = run()
    eventually(lambda: told, within=30)
    [argv] = starts(cloudflared)
    config = Path(argv[argv.index("--config") + 1])
    assert config.read_text().startswith("#")
    assert argv[argv.index("--url") + 1] == TARGET
    assert "--no-autoupdate" in argv


def test_one_that_is_killed_is_started_again_and_its_new_url_is_told(cloudflared, run):
    (cloudflared / "plan").write_text("first-one\nsecond-one\n")
    process, told = run()
    eventually(lambda: process.pid, within=30)
    os.kill(process.pid, signal.SIGKILL)
    eventually(lambda: len(told) == 2, within=30)
    assert told == [url("first-one"), url("second-one")]


def test_one_that_cloudflare_refused_is_asked_for_again_and_the_reason_is_told(
    cloudflared, run, caplog
):
    (cloudflared / "plan").write_text("refused\noffline\nat-last\n")
    _, told = run()
    eventually(lambda: told, within=30)
    assert told == [url("at-last")]
    assert "too many quick tunnels to this network: 429" in caplog.text
    assert "no such host" in caplog.text


def test_one_that_never_tells_a_url_counts_as_dead(cloudflared, run, monkeypatch, caplog):
    assert TunnelProcess.start_seconds == 60
    monkeypatch.setattr(TunnelProcess, "start_seconds", 0.2)
    (cloudflared / "plan").write_text("silent\n")
    process, told = run()
    eventually(lambda: process.restarts > 1, within=30)
    assert not told
    assert "it did not work within 0 s" in caplog.text


def test_one_that_cloudflare_has_dropped_is_replaced_by_a_new_one(cloudflared, run):
    (cloudflared / "plan").write_text("dropped slept-too-long\nanother\n")
    _, told = run()
    eventually(lambda: told, within=30)
    (cloudflared / "drop").touch()
    eventually(lambda: len(told) == 2, within=30)
    assert told[1] == url("another")


def test_a_named_tunnel_has_the_url_that_the_user_gave(cloudflared, run):
    (cloudflared / "plan").write_text("named\n")
    _, told = run(NamedTunnel(TARGET, "gpu", "https://gpu.example.org"))
    eventually(lambda: told, within=30)
    assert told == ["https://gpu.example.org"]
    [argv] = starts(cloudflared)
    assert argv[argv.index("run") :] == ["run", "--url", TARGET, "gpu"]
    assert "--config" not in argv  # theirs counts


def test_a_named_tunnel_without_its_hostname_is_refused(cloudflared):
    with pytest.raises(UsageError, match="--url https://HOSTNAME"):
        NamedTunnel(TARGET, "gpu", "").check()


def test_without_the_program_one_is_told_where_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match=r"no cloudflared on the PATH.*Install it from"):
        QuickTunnel(TARGET, tmp_path).check()


# As users of the real program reported them, each of another year.
QUICK_LOGS = [
    """\
2021-09-03T10:44:38Z INF Requesting new quick Tunnel on trycloudflare.com...
2021-09-03T10:44:41Z INF +--------------------------------------------------------------------+
2021-09-03T10:44:41Z INF |  https://symantec-transferred-lock-revenues.trycloudflare.com      |
2021-09-03T10:44:41Z INF +--------------------------------------------------------------------+
2022-06-01T16:23:12Z INF Connection c206cf44-945f-4c3c-a85c-af60c6338dc2 registered connIndex=0
""",
    """\
2023-04-18T14:06:46Z INF Requesting new quick Tunnel on trycloudflare.com...
2023-04-18T14:06:49Z INF |  Your quick Tunnel has been created! Visit it at (it may take some time \
to be reachable):  |
2023-04-18T14:06:49Z INF |  https://symantec-transferred-lock-revenues.trycloudflare.com      |
2026-09-30T07:31:18Z INF Registered tunnel connection connIndex=0 location=del04 protocol=quic
""",
]


@pytest.mark.parametrize("log", QUICK_LOGS)
def test_what_real_ones_printed_is_understood(log, tmp_path):
    tunnel = QuickTunnel(TARGET, tmp_path)
    *before, last = log.splitlines()
    assert all(tunnel.heard(line) for line in before)
    assert tunnel.url() is None  # it has a name, and leads nowhere yet
    assert tunnel.heard(last)
    assert tunnel.url() == url("symantec-transferred-lock-revenues")


def test_the_address_of_cloudflares_own_api_is_no_tunnel(tmp_path):
    tunnel = QuickTunnel(TARGET, tmp_path)
    tunnel.heard('failed to request quick Tunnel: Post "https://api.trycloudflare.com/tunnel": EOF')
    tunnel.heard("Registered tunnel connection connIndex=0")
    assert tunnel.url() is None


def test_the_stand_in_says_that_it_is_one(cloudflared):
    said = subprocess.run(["cloudflared", "--version"], capture_output=True, text=True, check=True)
    assert "stand-in for tests" in said.stdout
    assert "stand-in" in (cloudflared_stand_in.__doc__ or "")
