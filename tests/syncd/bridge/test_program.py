"""A tunnel by any program that prints a URL."""

from __future__ import annotations

import contextlib
import itertools
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

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
    assert eventually(made.url) == "https://slow.example"


def test_ours_is_found_whatever_else_is_printed_after_it():
    made = tunnel("x")
    made.heard("https://good.example")
    for number in range(50):
        made.heard(f"see https://other-{number}.example")
    assert made.url() == "https://good.example"


class Looks:
    """What `leads_here` was asked, by a clock that each look moves on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
        self.now, self.seconds = 100.0, seconds
        self.asked: list[tuple[str, float]] = []
        clock = SimpleNamespace(monotonic=lambda: self.now)
        monkeypatch.setattr("syncd.bridge.program.time", clock)

    def __call__(self, url: str) -> bool:
        self.asked.append((url, self.now))
        self.now += self.seconds
        return "good" in url

    def pauses(self, url: str) -> list[float]:
        at = [when for asked, when in self.asked if asked == url]
        return [later - when for when, later in itertools.pairwise(at)]


def test_each_has_its_turn_when_none_answers_and_new_ones_keep_coming(monkeypatch):
    looks = Looks(monkeypatch, seconds=1.0)
    made = tunnel("x", looks)
    made.heard("https://good.example")
    for number in range(20):
        made.heard(f"https://silent-{number}.example")
    for number in range(20, 40):
        if made.url():
            break
        made.heard(f"https://silent-{number}.example")
    assert made.url() == "https://good.example"
    assert looks.asked[0][0] == "https://silent-19.example"


def test_one_that_leads_elsewhere_is_tried_less_and_less_often_and_then_no_more(monkeypatch):
    looks = Looks(monkeypatch, seconds=0.0)
    made = tunnel("x", looks)
    made.heard("https://terms.example")
    for _ in range(4000):
        assert made.url() is None
        looks.now += 0.05
    pauses = looks.pauses("https://terms.example")
    assert pauses == sorted(pauses)
    assert len(pauses) == 8
    made.heard("https://terms.example")
    made.url()
    assert len(looks.asked) == 10


def test_a_flood_is_bounded_and_what_failed_makes_room(monkeypatch):
    looks = Looks(monkeypatch, seconds=0.0)
    made = tunnel("x", looks)
    made.heard("https://failed.example")
    made.url()
    made.heard("https://good.example")
    for number in range(198):
        made.heard(f"https://other-{number}.example")
    assert made.url() == "https://good.example"
    for number in range(5_000):
        made.heard(f"https://other-{number}.example")
    assert len(made._printed) <= 200


def test_what_a_program_logs_of_requests_is_no_new_url():
    made = tunnel("x")
    made.heard("https://good.example")
    assert made.url() == "https://good.example"
    made.heard("GET https://good.example/objects/w-000001 200")
    assert made.url() == "https://good.example"


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


@pytest.fixture
def server() -> Iterator[Callable[[Callable[[socket.socket], None]], str]]:
    """Return a function that serves each connection by another one, and returns the URL."""
    with contextlib.ExitStack() as stack:

        def start(answer: Callable[[socket.socket], None]) -> str:
            listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))

            def serve() -> None:
                with contextlib.suppress(OSError):
                    while True:
                        with listener.accept()[0] as connection, contextlib.suppress(OSError):
                            connection.recv(65536)
                            answer(connection)

            threading.Thread(target=serve, daemon=True).start()
            # A thread that waits in accept() is woken by this alone.
            stack.callback(listener.shutdown, socket.SHUT_RDWR)
            return f"http://127.0.0.1:{listener.getsockname()[1]}"

        yield start


def unauthorised(connection: socket.socket) -> None:
    connection.sendall(b'HTTP/1.1 401 Unauthorized\r\nWWW-Authenticate: Basic realm="ours"\r\n\r\n')


def endless(connection: socket.socket) -> None:
    connection.sendall(b"HTTP/1.1 401 Unauthorized\r\nX: ")
    while True:
        connection.sendall(b"x")
        time.sleep(0.05)


def flood(connection: socket.socket) -> None:
    connection.sendall(b"HTTP/1.1 401 Unauthorized\r\n")
    while True:
        connection.sendall(b"X: " + b"x" * 60_000 + b"\r\n")


@pytest.mark.parametrize("answer", [endless, flood])
def test_a_server_whose_answer_never_ends_is_given_up(server, answer):
    at = server(answer)
    found: list[bool] = []
    threading.Thread(target=lambda: found.append(asks_for("ours", at)), daemon=True).start()
    eventually(lambda: found == [False], within=30)


def test_a_server_that_leads_on_to_ours_does_not_count(server):
    ours = server(unauthorised)
    assert asks_for("ours", f"{ours}/a/b")
    to = f"HTTP/1.1 302 Found\r\nLocation: {ours}/\r\nContent-Length: 0\r\n\r\n"
    assert not asks_for("ours", server(lambda connection: connection.sendall(to.encode())))


def test_another_hosts_url_is_asked_for_by_the_systems_proxy(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as proxy, ThreadPoolExecutor(1) as pool:
        at = f"127.0.0.1:{proxy.getsockname()[1]}"
        monkeypatch.setenv("https_proxy", f"http://me:p%40ss@{at}")
        monkeypatch.setenv("no_proxy", "")
        asked = pool.submit(asks_for, "ours", "https://tunnel.example/x")
        with proxy.accept()[0] as connection:
            said = connection.recv(65536).decode()
        assert not asked.result(30)
    assert said.startswith("CONNECT tunnel.example:443 ")
    assert "Proxy-Authorization: Basic bWU6cEBzcw==\r\n" in said


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
