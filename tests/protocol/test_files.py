"""A file that somebody else makes may be anything but a file."""

from __future__ import annotations

import errno
import os
import socket
from pathlib import Path

import pytest

from protocol.files import open_regular, read_regular


def test_a_regular_file_is_read_up_to_a_limit(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"0123456789")
    assert read_regular(path) == b"0123456789"
    assert read_regular(path, 4) == b"0123"


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    with pytest.raises(OSError, match="not a regular file") as caught:
        read_regular(path)
    assert caught.value.errno == errno.EINVAL


def test_folders_sockets_and_devices_are_no_files(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "socket"))
        for path in (tmp_path, tmp_path / "socket", Path("/dev/zero")):
            with pytest.raises(OSError, match=r"."):
                open_regular(path)


def test_a_link_is_followed_only_where_it_may_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"there")
    link = tmp_path / "link"
    link.symlink_to("file")
    assert read_regular(link) == b"there"
    with pytest.raises(OSError, match=r".") as caught:
        open_regular(link, follow=False)
    assert caught.value.errno == errno.ELOOP
