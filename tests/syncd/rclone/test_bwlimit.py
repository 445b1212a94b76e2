"""The setting `bwlimit`, as rclone carries it out over a real server."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from servers import WebdavServer

from syncd.rclone.rcd import Rclone
from syncd.rclone.remote import RcloneRemote

SIZE = 256 * 1024


@pytest.mark.parametrize(
    ("limit", "up", "down"),
    [
        ("512k", 524288, 524288),
        ("512k:off", 524288, -1),
        ("off:512k", -1, 524288),
        ("Mon-00:00,512k Thu-00:00,512k", 524288, 524288),
        ("", -1, -1),
    ],
)
def test_uploads_and_downloads_keep_to_their_limit(
    limit: str, up: int, down: int, tmp_path: Path, webdav: WebdavServer, rclone_config: Path
) -> None:
    """That something takes at least so long is no guess: nothing but the limit can hold it up."""
    rclone_config.write_text(webdav.section("there"))
    source = tmp_path / "source"
    source.write_bytes(os.urandom(SIZE))
    with Rclone(tmp_path / "rclone", config=rclone_config, bwlimit=limit) as rclone:
        told = rclone.call("core/bwlimit", {}, 10)
        assert (told["bytesPerSecondTx"], told["bytesPerSecondRx"]) == (up, down)
        # A read-ahead would ask for its bytes before what is small and in a hurry.
        ahead = rclone.call("options/get", {}, 10)["main"]["BufferSize"]
        assert (ahead == 0) is bool(limit)
        remote = RcloneRemote(rclone, webdav.fs("there"))
        began = time.monotonic()
        remote.upload(source, "object")
        sent = time.monotonic()
        # Just after a transfer, and so without what an idle limit would let through at once.
        assert remote.read("object", limit=SIZE) == source.read_bytes()
        remote.download("object", tmp_path / "copy", length=SIZE)
        read = time.monotonic()
    # Half of what it should be, for rclone counts what it reads ahead.
    if up > 0:
        assert sent - began > SIZE / up / 2
    if down > 0:
        assert read - sent > SIZE / down / 2
