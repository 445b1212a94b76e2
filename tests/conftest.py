"""Fixtures that several packages' tests share: real remotes, and the rclone that reaches them."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

# The tests' own helpers; --import-mode=importlib puts no folder of tests on sys.path.
sys.path.insert(0, str(Path(__file__).parent / "support"))

from ends import Ends
from places import Place
from servers import SERVERS, Server, WebdavServer

from syncd.rclone.rcd import Rclone
from syncd.rclone.remote import RcloneRemote

# Both ends over these are for the long form.
OTHERS = [name for name in SERVERS if name != "webdav"]
# A shell that puts the tests in the background ignores these, and so would every process of theirs.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGQUIT, signal.SIG_DFL)


@pytest.fixture
def webdav(tmp_path: Path) -> Iterator[WebdavServer]:
    """A running `rclone serve webdav` of an empty folder, with a password."""
    server = WebdavServer(tmp_path / "webdav")
    server.start()
    yield server
    server.kill()


@pytest.fixture(params=SERVERS)
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Server]:
    """A running server of each kind in turn."""
    server = SERVERS[request.param](tmp_path / "server")
    server.start()
    yield server
    server.kill()


@pytest.fixture
def rclone_config(tmp_path: Path) -> Path:
    """An rclone configuration file of the test's own, empty at first."""
    path = tmp_path / "rclone.conf"
    path.touch(mode=0o600)
    return path


@pytest.fixture
def rclone(tmp_path: Path, rclone_config: Path) -> Iterator[Rclone]:
    """A running rclone with `rclone_config`."""
    with Rclone(tmp_path / "run", config=rclone_config) as rclone:
        yield rclone


@pytest.fixture(params=["local", *SERVERS])
def place(
    request: pytest.FixtureRequest, tmp_path: Path, rclone: Rclone, rclone_config: Path
) -> Iterator[Place]:
    """An empty remote of each kind in turn."""
    if request.param == "local":
        root = tmp_path / "remote"
        root.mkdir()
        yield Place(RcloneRemote(rclone, str(root)), rclone, root, None)
        return
    server = SERVERS[request.param](tmp_path / "server")
    server.start()
    rclone_config.write_text(server.section("there"))
    yield Place(RcloneRemote(rclone, server.fs("there")), rclone, server.root, server)
    server.kill()


@pytest.fixture
def make_file(tmp_path: Path) -> Callable[[str, bytes], Path]:
    """Return a function that makes a local file, to upload, of a name and content."""

    def make(name: str, content: bytes) -> Path:
        folder = tmp_path / "outgoing"
        folder.mkdir(exist_ok=True)
        path = folder / name
        path.unlink(missing_ok=True)  # on the remote's disk, what was uploaded may be the same file
        path.write_bytes(content)
        return path

    return make


@pytest.fixture(
    params=["local", "webdav", *(pytest.param(s, marks=pytest.mark.long) for s in OTHERS)]
)
def ends(request: pytest.FixtureRequest, tmp_path: Path, rclone_config: Path) -> Iterator[Ends]:
    """Both ends over each kind of remote in turn, no daemon started yet."""
    if request.param == "local":
        (tmp_path / "remote").mkdir()
        both = Ends(tmp_path, str(tmp_path / "remote"))
        yield both
        both.close()
        return
    server = SERVERS[request.param](tmp_path / "server")
    server.start()
    rclone_config.write_text(server.section("there"))
    both = Ends(tmp_path, server.fs("there"), rclone_config=str(rclone_config))
    yield both
    both.close()
    server.kill()


@pytest.fixture
def local_ends(tmp_path: Path) -> Iterator[Ends]:
    """Both ends over rclone's local backend, no daemon started yet."""
    root = tmp_path / "remote"
    root.mkdir()
    both = Ends(tmp_path, str(root))
    yield both
    both.close()
