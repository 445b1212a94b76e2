"""Counting the HTTP requests in a stream of bytes, as they pass by."""

from __future__ import annotations

import re
from collections.abc import Generator

_REQUEST_LINE = re.compile(rb"[A-Z]+ [^ \r\n]+ HTTP/1\.[01]\r\n")
_LENGTH = re.compile(rb"(?im)^content-length:[ \t]*(\d+)[ \t]*\r$")
_CHUNKED = re.compile(rb"(?im)^transfer-encoding:.*\bchunked[ \t]*\r$")
_LONGEST_HEAD = 64 * 1024


class RequestCounter:
    """Counts the requests that one client sends over one connection, kept alive or not.

    It follows the messages (RFC 9112): a head, then a body by its length or in chunks. So a request
    that is pipelined, or shares a segment with the body before it, counts, and a body that looks
    like a request does not. What is no HTTP/1 (SSH, TLS) counts as no request.
    """

    def __init__(self) -> None:
        self.requests = 0
        self._unread = bytearray()
        self._reader = self._messages()
        self._ended = False
        next(self._reader)

    def feed(self, data: bytes) -> None:
        """Take the next bytes that the client has sent."""
        if not self._ended:
            try:
                self._reader.send(data)
            except (StopIteration, ValueError):
                self._ended = True  # it is no HTTP, or none any more

    def _messages(self) -> Generator[None, bytes, None]:
        while True:
            head = yield from self._until(b"\r\n\r\n")
            if not _REQUEST_LINE.match(head):
                return
            self.requests += 1
            if _CHUNKED.search(head):
                yield from self._chunks()
            elif length := _LENGTH.search(head):
                yield from self._skip(int(length[1]))

    def _chunks(self) -> Generator[None, bytes, None]:
        while size := int((yield from self._until(b"\r\n")).partition(b";")[0], 16):
            yield from self._skip(size + len(b"\r\n"))
        while (yield from self._until(b"\r\n")) != b"\r\n":
            pass  # trailers

    def _until(self, mark: bytes) -> Generator[None, bytes, bytes]:
        """Take bytes to the end of `mark`. Raises ValueError when it does not come."""
        while (at := self._unread.find(mark)) < 0:
            if len(self._unread) > _LONGEST_HEAD:
                raise ValueError("too long for a head")
            self._unread += yield
        taken = bytes(self._unread[: at + len(mark)])
        del self._unread[: len(taken)]
        return taken

    def _skip(self, length: int) -> Generator[None, bytes, None]:
        while length > len(self._unread):
            length -= len(self._unread)
            self._unread.clear()
            self._unread += yield
        del self._unread[:length]
