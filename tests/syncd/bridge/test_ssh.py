"""The tunnel by OpenSSH, with a real sshd and a real ssh."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import threading
import urllib.request
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from servers import OpenSshServer, free_port
from waiting import eventually

from protocol.errors import UsageError
from syncd.bridge.ssh import SshTunnel
from syncd.bridge.tunnel import TunnelProcess

pytestmark = pytest.mark.usefixtures("quick_retries")


@pytest.fixture
def sshd(tmp_path: Path, program: Callable[[str, str], Path]) -> Iterator[OpenSshServer]:
    """A running sshd, which `ssh far` reaches without any question."""
    server = OpenSshServer(tmp_path / "sshd")
    real = shutil.which("ssh")
    config = tmp_path / "ssh_config"
    config.write_text(
        f"Host far\n  HostName 127.0.0.1\n  Port {server.port}\n  User {server.user}\n"
        f"  IdentityFile {server.folder}/client\n  IdentitiesOnly yes\n"
        f"  StrictHostKeyChecking no\n  UserKnownHostsFile /dev/null\n"
    )
    program("ssh", f'exec {real} -F {config} "$@"')
    server.start()
    yield server
    server.kill()


@pytest.fixture
def here() -> Iterator[str]:
    """A server of this machine that says "here"; yields its host:port."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"here")

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def tunnel(sshd: OpenSshServer, here: str, tmp_path: Path) -> Iterator[TunnelProcess]:
    """A tunnel from a port of the far side to `here`; its `told` is where its URLs go."""
    port = free_port()
    ssh = SshTunnel.parse(f"far:{port}", target=here, port=1, proxy="")
    process = TunnelProcess(tmp_path / "run", ssh, lambda url: None)
    process.start()
    yield process
    process.close()


def leads_here(tunnel: TunnelProcess) -> bool:
    url = tunnel._tunnel.url()
    if url is None:
        return False
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return bool(answer.read() == b"here")
    except OSError:
        return False


def test_a_port_of_the_far_sides_loopback_leads_here(tunnel):
    eventually(lambda: leads_here(tunnel), within=30)
    assert tunnel._tunnel.url() == f"http://127.0.0.1:{tunnel._tunnel.port}"


def test_an_ssh_that_is_killed_is_started_again(tunnel):
    eventually(lambda: tunnel.pid, within=30)
    before = tunnel.pid
    os.kill(before, signal.SIGKILL)
    eventually(lambda: tunnel.pid not in (None, before) and leads_here(tunnel), within=30)


def test_when_the_far_side_is_killed_the_tunnel_comes_back_with_it(tunnel, sshd):
    eventually(lambda: leads_here(tunnel), within=30)
    sshd.kill()
    eventually(lambda: tunnel.restarts > 0 and not leads_here(tunnel), within=30)
    sshd.start()
    eventually(lambda: leads_here(tunnel), within=30)


def test_a_port_that_is_taken_there_is_said_and_tried_until_it_is_free(
    sshd, here, tmp_path, caplog
):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        ssh = SshTunnel.parse(f"far:{port}", target=here, port=1, proxy="")
        told: list[str] = []
        process = TunnelProcess(tmp_path / "run", ssh, told.append)
        process.start()
        try:
            failed = f"remote port forwarding failed for listen port {port}"
            eventually(lambda: failed in caplog.text, within=30)
            assert not told
            other.close()
            eventually(lambda: told, within=30)
        finally:
            process.close()
    assert told == [f"http://127.0.0.1:{port}"]


def test_a_host_that_refuses_us_is_said_without_asking_for_a_password(sshd, here, tmp_path, caplog):
    (sshd.folder / "client.pub").write_text("")
    ssh = SshTunnel.parse("far:8766", target=here, port=1, proxy="")
    process = TunnelProcess(tmp_path / "run", ssh, lambda url: None)
    process.start()
    eventually(lambda: "Permission denied" in caplog.text, within=30)
    process.close()


def test_the_port_is_the_bridges_own_unless_it_is_given():
    parsed = SshTunnel.parse("me@far", target="127.0.0.1:8766", port=8766, proxy="")
    assert (parsed.host, parsed.port) == ("me@far", 8766)
    assert SshTunnel.parse("far:80", target="t", port=1, proxy="").port == 80


@pytest.mark.parametrize("text", ["", "-oProxyCommand=x", "far:", "far:99999", "a b", "far:x"])
def test_what_is_no_host_is_refused(text):
    with pytest.raises(UsageError, match="not ssh:user@host"):
        SshTunnel.parse(text, target="t", port=1, proxy="")


def test_without_a_proxy_a_person_is_told_how_the_worker_gets_there():
    ssh = SshTunnel.parse("me@far", target="127.0.0.1:8766", port=8766, proxy="")
    assert "ssh -f -N -o ExitOnForwardFailure=yes -L 8766:127.0.0.1:8766 me@far" in ssh.advice()
    behind = SshTunnel.parse("me@far", target="t", port=8766, proxy="https://gpu.example.org")
    behind.heard("debug1: remote forward success for: listen 127.0.0.1:8766, connect t")
    assert (behind.advice(), behind.url()) == ("", "https://gpu.example.org")
