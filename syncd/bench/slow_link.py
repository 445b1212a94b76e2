"""A slow, bad link of our own: a TCP proxy on the loopback before any server.

    with SlowLink(server.port, round_trip=0.05) as link:
        ...  # use link.port in place of the server's

For tests and for `syncd bench link`, since not every kernel can delay packets, and none can be
asked to reset a connection at a given byte. It delays as a wire does: each byte arrives half a
round trip after it was sent, however many are on their way, and a connection costs one round trip
before its first byte, which the loopback hides.
"""

from __future__ import annotations

import asyncio
import contextlib
import selectors
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self, cast

from syncd.bench.http_requests import RequestCounter

_READ_BYTES = 256 * 1024
# What one connection may have on its way: enough for 1 GB/s at 60 ms.
_WINDOW_BYTES = 32 * 1024 * 1024
# At a limited rate it is what the rate carries meanwhile, and as much as a router would queue.
_QUEUE_SECONDS = 0.1
_LEAST_WINDOW_BYTES = 64 * 1024
# A limited rate is kept by pieces that take so long each.
_PIECE_SECONDS = 0.005
_END = b""
_RESET = None


@dataclass
class _Line:
    """One direction of the whole link, which all connections share."""

    passed: int = 0
    free_at: float = 0.0
    cut_at: int = 0
    cut_every: int = 0
    cuts: int = 0  # that are to come

    def sent(self, now: float, size: int, rate: float | None) -> float:
        """Return when the last of `size` bytes is on its way, at so many bytes a second."""
        if not rate:
            return now
        self.free_at = max(now, self.free_at) + size / rate
        return self.free_at

    def take(self, data: bytes) -> tuple[bytes, bool]:
        """Return what passes of `data`, and whether the connection is cut after it."""
        cut = self.cuts > 0 and self.passed + len(data) >= self.cut_at
        if cut:
            data = data[: self.cut_at - self.passed]
            self.cuts -= 1
            self.cut_at += self.cut_every
        self.passed += len(data)
        return data, cut

    def cut_after(self, size: int, times: int) -> None:
        """Cut after so many more bytes, so often."""
        self.cut_at, self.cut_every, self.cuts = self.passed + size, size, times


class _End(asyncio.BufferedProtocol):
    """One socket of a connection, and what was read from it and is on its way to the other."""

    other: _End

    def __init__(self, link: SlowLink, line: _Line, seen: Callable[[bytes], None]) -> None:
        self.transport: asyncio.Transport | None = None
        self._lost = False
        self.not_before = 0.0
        self._link = link
        self._line = line
        self._seen = seen  # is told what passes
        self._way: deque[tuple[float, bytes | None]] = deque()
        self._way_bytes = 0
        self._last_due = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._full = False  # this socket takes no more just now
        self._ended = False  # all that was read has been passed on
        self._buffer = memoryview(bytearray(_READ_BYTES))

    # What asyncio calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self._link.opened(self)
        self.other.deliver()

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        rate = self._link.bytes_per_second
        step = max(1, int(rate * _PIECE_SECONDS)) if rate else nbytes
        for start in range(0, nbytes, step):
            piece = bytes(self._buffer[start : min(start + step, nbytes)])
            self._put(piece)
        if self._way_bytes > self._window() and self.transport:
            self.transport.pause_reading()

    def eof_received(self) -> bool:
        self._put(_END)
        return True  # the other way stays open

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost = True
        if exc is not None:
            self._put(_RESET)
        self._link.closed(self)

    def pause_writing(self) -> None:
        self._full = True

    def resume_writing(self) -> None:
        self._full = False
        self.other.deliver()

    # The way to the other socket

    def _put(self, piece: bytes | None) -> None:
        size = len(piece or b"")
        now = max(self._link.now(), self.not_before)
        sent = self._line.sent(now, size, self._link.bytes_per_second)
        self._last_due = max(self._last_due, sent + self._link.round_trip / 2)
        self._way.append((self._last_due, piece))
        self._way_bytes += size
        self.deliver()

    def deliver(self) -> None:
        """Pass on what is due, and come again for the rest."""
        if self._timer:
            self._timer.cancel()
            self._timer = None
        while self._way and self._link.flowing and self.other.takes():
            due, piece = self._way[0]
            if due > self._link.now():
                self._timer = self._link.call_at(due, self.deliver)
                return
            self._way.popleft()
            self._way_bytes -= len(piece or b"")
            self._pass_on(piece)
        if self.transport and self._way_bytes <= self._window() / 2:
            self.transport.resume_reading()

    def takes(self) -> bool:
        """Whether the socket takes what is passed on to it."""
        return self.transport is not None and not self._lost and not self._full

    def _pass_on(self, piece: bytes | None) -> None:
        transport = self.other.transport
        assert transport is not None
        if piece is _RESET:
            self.reset()
        elif piece == _END:
            self._ended = True
            with contextlib.suppress(OSError):  # it was reset this very moment
                transport.write_eof()
            if self.other._ended:
                for end in (self, self.other):
                    if end.transport:
                        end.transport.close()
        else:
            data, cut = self._line.take(piece)
            self._seen(data)
            transport.write(data)
            if cut:
                self.reset()

    def _window(self) -> float:
        rate = self._link.bytes_per_second
        if not rate:
            return _WINDOW_BYTES
        return max(_LEAST_WINDOW_BYTES, rate * (self._link.round_trip / 2 + _QUEUE_SECONDS))

    def reset(self) -> None:
        """End the connection with a RST to either side."""
        for end in (self, self.other):
            end._way.clear()
            if end.transport and not end._lost:
                # No lingering (SO_LINGER with 0 s): closing sends RST in place of FIN.
                sock = end.transport.get_extra_info("socket")
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                end.transport.abort()


class SlowLink:
    """A proxy to a server's port on `host`, with faults to be asked for from any thread.

    `round_trip` is in seconds, `bytes_per_second` the rate of each direction, which all connections
    share; both may be changed while it runs. What a method asks for is done when it returns.
    """

    def __init__(
        self,
        port: int,
        *,
        host: str = "127.0.0.1",
        round_trip: float = 0.0,
        bytes_per_second: float | None = None,
    ) -> None:
        self.round_trip = round_trip
        self.bytes_per_second = bytes_per_second
        self.flowing = True
        self.requests = 0
        self._server = (host, port)
        self._up, self._down = _Line(), _Line()
        self._open: set[_End] = set()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._listener: socket.socket | None = None

    @property
    def port(self) -> int:
        """Where it listens on the loopback, also while it refuses."""
        return int(self._reserved.getsockname()[1])

    @property
    def up(self) -> int:
        """How many bytes have passed from clients to the server."""
        return self._up.passed

    @property
    def down(self) -> int:
        """How many bytes have passed from the server to clients."""
        return self._down.passed

    def __enter__(self) -> Self:
        # select() waits to the microsecond, where epoll_wait() rounds up to the millisecond.
        self._loop = asyncio.SelectorEventLoop(selectors.SelectSelector())
        # Bound and never listening, it keeps the port for us while we refuse.
        self._reserved = _bound(0)
        self._thread = threading.Thread(target=self._loop.run_forever, name="slow link")
        self._thread.start()
        self.accept()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.refuse()
        self._do(self._end_all())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._reserved.close()

    # Faults

    def reset_all(self) -> None:
        """Reset every open connection, both its sides."""
        self._do(self._reset_all())

    def refuse(self) -> None:
        """Refuse new connections; those that are open stay."""
        self._do(self._refuse())

    def accept(self) -> None:
        """Take new connections again."""
        self._do(self._accept())

    def stall(self) -> None:
        """Let no byte pass; connections stay open and may be opened."""
        self._do(self._set_flowing(False))

    def resume(self) -> None:
        """Let bytes pass again."""
        self._do(self._set_flowing(True))

    def cut_after(self, size: int, *, down: bool = False, times: int = 1) -> None:
        """Once `size` more bytes have gone up (or `down`), reset the connection they went by.

        So often, each time after as many more; none for 0, which takes back what was asked for.
        """
        self._do(self._cut(self._down if down else self._up, size, times))

    def _do(self, action: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(action, self._loop).result()

    # In the loop's thread

    def now(self) -> float:
        """Return the loop's time, in seconds."""
        return self._loop.time()

    def call_at(self, when: float, action: Callable[[], None]) -> asyncio.TimerHandle:
        """Do something at a time of the loop's."""
        return self._loop.call_at(when, action)

    def opened(self, end: _End) -> None:
        """Take note of a socket that is open, and connect a client that is new to the server."""
        self._open.add(end)
        if end.other.transport is None:
            # The handshake: to the server and back, and the client's first bytes follow.
            end.not_before = self.now() + self.round_trip
            self._begin(self._connect(end.other, end.not_before))

    def closed(self, end: _End) -> None:
        """Take note that a socket is closed."""
        self._open.discard(end)

    def _new_client(self) -> _End:
        counter = RequestCounter()

        def seen(data: bytes) -> None:
            before = counter.requests
            counter.feed(data)
            self.requests += counter.requests - before

        client = _End(self, self._up, seen)
        client.other = _End(self, self._down, lambda data: None)
        client.other.other = client
        return client

    async def _connect(self, server: _End, not_before: float) -> None:
        await asyncio.sleep(not_before + self.round_trip / 2 - self.now())
        if server.other not in self._open:
            return
        try:
            await self._loop.create_connection(lambda: server, *self._server)
        except OSError:
            server.other.reset()
        else:
            if server.other not in self._open:
                server.reset()

    def _begin(self, work: Coroutine[Any, Any, Any]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _accept(self) -> None:
        if self._listener is None:
            self._listener = _bound(self.port)
            self._listener.setblocking(False)
            self._listener.listen(512)
            self._loop.add_reader(self._listener, self._take_clients, self._listener)

    async def _refuse(self) -> None:
        if self._listener is not None:
            self._take_clients(self._listener)  # who has connected already is not refused
            self._loop.remove_reader(self._listener)
            self._listener.close()
            self._listener = None

    def _take_clients(self, listener: socket.socket) -> None:
        with contextlib.suppress(BlockingIOError):
            while True:
                client, _ = listener.accept()
                self._begin(self._loop.connect_accepted_socket(self._new_client, client))

    async def _reset_all(self) -> None:
        for end in list(self._open):
            end.reset()

    async def _set_flowing(self, flowing: bool) -> None:
        self.flowing = flowing
        for end in list(self._open):
            end.deliver()

    async def _cut(self, line: _Line, size: int, times: int) -> None:
        line.cut_after(size, times)

    async def _end_all(self) -> None:
        while self._open or self._tasks:
            for task in self._tasks:
                task.cancel()
            await self._reset_all()
            await asyncio.sleep(0)


def _bound(port: int) -> socket.socket:
    """Return a socket that is bound to a port of the loopback, or to any free one for 0."""
    sock = socket.socket()
    try:
        if hasattr(socket, "SO_REUSEPORT"):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sock.bind(("127.0.0.1", port))
    except BaseException:
        sock.close()
        raise
    return sock
