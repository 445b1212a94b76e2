"""A tunnel by any program that prints a URL."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest
from waiting import eventually

from protocol.errors import UsageError
from syncd.bridge.program import ProgramTunnel, asks_for
from syncd.bridge.tunnel import TunnelProcess

# A program that leads a port of its own to ours, and prints what such programs print.
FORWARD = """
import socket, sys, threading
there = int(sys.argv[1])
listener = socket.create_server(("127.0.0.1", 0))
print("Welcome! Follow us at https://social.example/us, see http://docs.example/faq.", flush=True)
print(f"your url is: http://127.0.0.1:{listener.getsockname()[1]}/", file=sys.stderr, flush=True)
def pump(one, other):
    while data := one.recv(65536):
        other.sendall(data)
    other.shutdown(socket.SHUT_WR)
while True:
    near, far = listener.accept()[0], socket.create_connection(("127.0.0.1", there))
    threading.Thread(target=pump, args=(near, far), daemon=True).start()
    threading.Thread(target=pump, args=(far, near), daemon=True).start()
"""


def tunnel(command: str, leads_here=lambda url: "good" in url, proxy: str = "") -> ProgramTunnel:
    return ProgramTunnel(command, address="127.0.0.1:8766", proxy=proxy, leads_here=leads_here)


def test_port_and_address_are_put_in_their_place():
    made = tunnel("lt --port {port} --to '{address} {x}'")
    assert made.command() == ["lt", "--port", "8766", "--to", "127.0.0.1:8766 {x}"]


def test_only_a_url_that_leads_here_counts():
    made = tunnel("x")
    made.heard('{"msg":"terms","url":"https://terms.example"}')
    assert made.url() is None
    made.heard('t=now lvl=info msg="started" url=https://good.example')
    made.heard("see https://status.example for more")
    assert made.url() == "https://good.example"


def test_the_newest_one_counts_also_without_a_restart():
    made = tunnel("x")
    made.heard("https://good-1.example")
    assert made.url() == "https://good-1.example"
    made.heard("reconnected: (https://good-2.example).")
    assert made.url() == "https://good-2.example"
    made.begin()
    assert made.url() is None


def test_one_that_does_not_lead_here_yet_is_tried_again():
    works: list[bool] = []
    made = tunnel("x", lambda url: bool(works))
    made.heard("https://slow.example/")
    assert made.url() is None
    works.append(True)
    assert made.url() == "https://slow.example"


def test_one_that_would_not_be_encrypted_is_passed_over():
    made = tunnel("x")
    made.heard("http://good.example https://127.0.0.1:8766/good http://good.example:80")
    assert made.url() is None


def test_with_a_url_that_was_given_nothing_need_be_printed():
    assert tunnel("x", proxy="https://gpu.example.org").url() == "https://gpu.example.org"


def test_a_program_that_is_not_there_is_named():
    with pytest.raises(UsageError, match="no-such-tunnel: there is no such program"):
        tunnel("no-such-tunnel {port}").check()
    with pytest.raises(UsageError, match="empty"):
        tunnel(" ")
    with pytest.raises(UsageError, match="No closing quotation"):
        tunnel("a 'b")


def test_a_server_that_is_not_ours_does_not_count(webdav):
    at = f"http://127.0.0.1:{webdav.port}"
    assert not asks_for("syncd-0123", at)  # 401, in another's name
    assert not asks_for("syncd-0123", "http://127.0.0.1:1")
    assert not asks_for("syncd-0123", "http://[")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        assert not asks_for("syncd-0123", f"http://127.0.0.1:{silent.getsockname()[1]}")


def test_a_program_that_forwards_and_prints_is_a_tunnel(webdav, tmp_path: Path):
    (tmp_path / "forward.py").write_text(FORWARD)
    command = f"{sys.executable} {tmp_path / 'forward.py'} {{port}}"
    address = f"127.0.0.1:{webdav.port}"
    told: list[str] = []
    made = ProgramTunnel(
        command, address=address, proxy="", leads_here=lambda url: asks_for("", url)
    )
    process = TunnelProcess(tmp_path / "run", made, told.append)
    process.start()
    try:
        eventually(lambda: told, within=30)
    finally:
        process.close()
    assert told[0].startswith("http://127.0.0.1:")
    assert address not in told[0]
