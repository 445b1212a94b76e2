from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest
from waiting import eventually

from syncd.bench.slow_link import SlowLink


class Echo:
    """A server that sends back what it gets, half-closes when its client does, and notes all."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.connections: list[socket.socket] = []
        self.got = bytearray()
        self.ends: list[str] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self.connections.append(connection)
            threading.Thread(target=self._echo, args=(connection,), daemon=True).start()

    def _echo(self, connection: socket.socket) -> None:
        with connection:
            try:
                while data := connection.recv(1 << 20):
                    self.got += data
                    connection.sendall(data)
                connection.sendall(b"bye")
                self.ends.append("end")
            except OSError as error:
                self.ends.append(type(error).__name__)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


@pytest.fixture
def echo() -> Iterator[Echo]:
    with closing(Echo()) as server:
        yield server


@contextmanager
def client(link: SlowLink) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", link.port), timeout=10) as sock:
        yield sock


def exactly(sock: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size and (part := sock.recv(size - len(data))):
        data += part
    return data


def send_for_ever(sock: socket.socket) -> None:
    while True:
        sock.sendall(bytes(100_000))


def hear_for_ever(sock: socket.socket, got: bytearray) -> None:
    while True:
        got += sock.recv(100)


def test_all_bytes_pass_both_ways_and_are_counted(echo: Echo) -> None:
    payload = bytes(range(256)) * 8192
    with SlowLink(echo.port) as link, client(link) as sock:
        sender = threading.Thread(target=sock.sendall, args=(payload,))
        sender.start()
        assert exactly(sock, len(payload)) == payload
        sender.join()
        assert (link.up, link.down) == (len(payload), len(payload))


def test_a_side_that_has_said_all_still_hears_the_other(echo: Echo) -> None:
    with SlowLink(echo.port, round_trip=0.02) as link, client(link) as sock:
        sock.sendall(b"last words")
        sock.shutdown(socket.SHUT_WR)
        assert exactly(sock, 100) == b"last wordsbye"
        assert echo.ends == ["end"]


def test_an_answer_takes_a_round_trip_and_the_first_one_two(echo: Echo) -> None:
    """No sooner than that, and with many on their way together: the delay is no queue."""
    with SlowLink(echo.port, round_trip=0.05) as link:
        began = time.monotonic()
        with client(link) as sock:
            sock.sendall(b"a")
            exactly(sock, 1)
            assert time.monotonic() - began >= 0.1
            began = time.monotonic()
            sent = 0
            while time.monotonic() - began < 0.045:
                sock.sendall(b"b")
                sent += 1
            assert exactly(sock, 1) == b"b"
            assert time.monotonic() - began >= 0.05
            assert exactly(sock, sent - 1) == b"b" * (sent - 1)
            link.round_trip = 0.0
            sock.sendall(b"c")
            assert exactly(sock, 1) == b"c"


def test_the_rate_is_one_for_all_connections(echo: Echo) -> None:
    """Two that send together take no less time than one after the other would."""
    with SlowLink(echo.port, bytes_per_second=1_000_000) as link:
        began = time.monotonic()
        with client(link) as one, client(link) as other:
            for sock in (one, other):
                threading.Thread(target=sock.sendall, args=(bytes(100_000),)).start()
            for sock in (one, other):
                assert exactly(sock, 100_000) == bytes(100_000)
        assert time.monotonic() - began >= 0.2


def test_requests_are_counted_and_other_talk_is_not(echo: Echo) -> None:
    with SlowLink(echo.port) as link, client(link) as sock, client(link) as other:
        sock.sendall(b"GET / HTTP/1.1\r\n\r\nGET / HTTP/1.1\r\n\r\n")
        other.sendall(b"SSH-2.0-x\r\n\r\n\r\n")
        exactly(sock, 36)
        exactly(other, 15)
        assert link.requests == 2


def test_a_reset_reaches_both_sides(echo: Echo) -> None:
    with SlowLink(echo.port) as link, client(link) as sock:
        sock.sendall(b"a")
        exactly(sock, 1)
        link.reset_all()
        with pytest.raises(ConnectionResetError):
            sock.recv(1)
        eventually(lambda: echo.ends == ["ConnectionResetError"])


def test_a_reset_by_one_side_reaches_the_other(echo: Echo) -> None:
    with SlowLink(echo.port, round_trip=0.02) as link, client(link) as sock:
        sock.sendall(b"a")
        exactly(sock, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        sock.close()
        eventually(lambda: echo.ends == ["ConnectionResetError"])


def test_it_refuses_and_takes_connections_on_the_same_port(echo: Echo) -> None:
    with SlowLink(echo.port) as link, client(link) as old:
        link.refuse()
        with pytest.raises(ConnectionRefusedError), client(link):
            pass
        old.sendall(b"still here")
        assert exactly(old, 10) == b"still here"
        link.accept()
        with client(link) as new:
            new.sendall(b"a")
            assert exactly(new, 1) == b"a"


def test_a_stalled_link_passes_nothing_until_it_goes_on(echo: Echo) -> None:
    with SlowLink(echo.port) as link, client(link) as sock:
        link.stall()
        sock.sendall(b"a")
        sock.settimeout(0.1)
        with pytest.raises(TimeoutError):
            sock.recv(1)
        assert (link.up, echo.got) == (0, b"")
        link.resume()
        sock.settimeout(10)
        assert exactly(sock, 1) == b"a"


@pytest.mark.parametrize("size", [0, 1, 70_000, 1_000_000])
def test_an_upload_is_cut_at_the_byte(echo: Echo, size: int) -> None:
    with SlowLink(echo.port) as link, client(link) as sock:
        link.cut_after(size)
        with pytest.raises(ConnectionError):
            send_for_ever(sock)
        assert link.up == size
        eventually(lambda: len(echo.ends) > 0)
        assert len(echo.got) <= size
        with client(link) as after:  # one cut, and no more
            after.sendall(b"a")
            assert exactly(after, 1) == b"a"


def test_it_cuts_as_often_as_it_was_asked_to(echo: Echo) -> None:
    with SlowLink(echo.port) as link:
        link.cut_after(100, times=3)
        for number in range(1, 4):
            with client(link) as sock, pytest.raises(ConnectionError):
                send_for_ever(sock)
            assert link.up == 100 * number
        link.cut_after(100, times=0)
        with client(link) as sock:
            sock.sendall(bytes(1000))
            assert exactly(sock, 1000) == bytes(1000)


def test_a_download_is_cut_at_the_byte(echo: Echo) -> None:
    with SlowLink(echo.port) as link, client(link) as sock:
        link.cut_after(3, down=True)
        sock.sendall(b"abcdef")
        got = bytearray()
        with pytest.raises(ConnectionResetError):
            hear_for_ever(sock, got)
        assert b"abc".startswith(got)
        assert link.down == 3


def test_a_server_that_is_gone_resets_its_client() -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port = bound.getsockname()[1]
        with SlowLink(port) as link, pytest.raises(ConnectionResetError), client(link) as sock:
            sock.recv(1)  # the reset may come as early as in connect()


def test_nothing_is_left_of_it_when_it_ends(echo: Echo) -> None:
    threads = threading.active_count()
    with SlowLink(echo.port, round_trip=5.0) as link, client(link) as waiting:
        waiting.sendall(b"never arrives")
        port = link.port
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))
    assert threading.active_count() == threads
    assert not echo.connections
