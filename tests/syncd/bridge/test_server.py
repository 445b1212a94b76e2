"""The bridge's server, with the real rclone: what can be reached in it, how, and what cannot."""

from __future__ import annotations

import base64
import http.client
import os
import signal
import socket
import stat
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from servers import free_port
from waiting import eventually

from protocol.errors import BusyError, RemoteError, UsageError
from protocol.paths import Layout
from syncd.bridge import bootstrap_folder, bridge_folder, objects_folder
from syncd.bridge.server import Address, BridgeServer
from syncd.rclone.address import Address as RemoteAddress
from syncd.rclone.rcd import Rclone
from syncd.rclone.remote import Fatal, RcloneRemote

PASSWORD = "a pass-word:/@"


def make_server(layout: Layout, **kwargs: object) -> BridgeServer:
    given = {"address": Address("127.0.0.1", free_port()), "password": PASSWORD, **kwargs}
    folder, objects = bridge_folder(layout), objects_folder(layout)
    places = {"objects": objects, "serve": layout.serve, "bootstrap": bootstrap_folder(layout)}
    return BridgeServer(folder, **places, **given)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Layout, BridgeServer]]:
    """A shared folder with something in each of its places, and its server."""
    root = tmp_path_factory.mktemp("shared") / 'a "quoted" ordner, ä'
    layout = Layout(root)
    for folder in (layout.serve / "sub", layout.inbox, layout.root / "store", layout.private):
        folder.mkdir(parents=True)
    layout.key.write_text("the key")
    layout.status.write_text("status")
    (layout.serve / "train.py").write_text("print(1)\n")
    (layout.serve / "sub" / "data").write_bytes(bytes(range(256)))
    (layout.serve / "link").symlink_to(layout.key)
    server = make_server(layout)
    server.start()
    yield layout, server
    server.close()


def token(password: str = PASSWORD) -> dict[str, str]:
    login = base64.b64encode(f"syncd:{password}".encode()).decode()
    return {"Authorization": f"Basic {login}"}


def ask(
    server: BridgeServer,
    method: str,
    path: str,
    body: bytes | None = None,
    headers: Mapping[str, str] | None = None,
) -> tuple[int, bytes]:
    """Send a request with its path as it is; return status and body."""
    connection = http.client.HTTPConnection(server.address.host, server.address.port, timeout=30)
    try:
        connection.request(method, path, body, {**token(), **(headers or {})})
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def files(layout: Layout) -> dict[str, bytes]:
    """Everything in the shared folder but the bridge's own."""
    found = [p for p in layout.root.rglob("*") if p.is_file() and "bridge" not in p.parts]
    return {str(p.relative_to(layout.root)): p.read_bytes() for p in found}


# The bootstrap cell's way: urllib and a token, nothing else.


def fetch(server: BridgeServer, path: str, headers: Mapping[str, str]) -> bytes:
    request = urllib.request.Request(f"{server.address.url}{path}", headers=dict(headers))
    with urllib.request.urlopen(request, timeout=30) as answer:
        return bytes(answer.read())


def test_a_file_of_serve_is_fetched_with_the_standard_library_and_a_token(served):
    _, server = served
    assert fetch(server, "/serve/train.py", token()) == b"print(1)\n"
    assert fetch(server, "/serve/sub/data", token()) == bytes(range(256))


def test_the_bootstrap_cells_function_in_the_documentation_works(served):
    _, server = served
    text = (Path(__file__).parents[3] / "docs" / "bridge.md").read_text("utf-8")
    names: dict[str, Any] = {}
    exec(text.split("```python\n")[1].split("```")[0], names)
    got = names["fetch"](server.address.url, "train.py", "syncd", PASSWORD)
    assert got == b"print(1)\n"


def test_a_part_of_a_file_is_fetched_by_range(served):
    _, server = served
    part = fetch(server, "/serve/sub/data", {**token(), "Range": "bytes=100-149"})
    assert part == bytes(range(100, 150))


@pytest.mark.parametrize(
    ("path", "headers", "code"),
    [
        ("/serve/train.py", {}, 401),
        ("/serve/train.py", token("wrong"), 401),
        ("/objects/", {}, 401),
        ("/", {}, 401),
        ("/serve/nothing.py", token(), 404),
        ("/serve/link", token(), 404),
    ],
)
def test_without_the_token_or_the_file_there_is_nothing(served, path, headers, code):
    with pytest.raises(urllib.error.HTTPError) as caught:
        fetch(served[1], path, headers)
    with caught.value as error:
        assert error.code == code


def test_a_file_of_serve_that_changes_is_seen_at_once(served):
    layout, server = served
    path = layout.serve / "changing"

    def got() -> tuple[int, bytes]:
        try:
            return ask(server, "GET", "/serve/changing")
        except http.client.IncompleteRead:
            return 0, b""  # it was replaced by a shorter one just then

    for number in range(20):
        content = b"x" * 10 + b"%d" % number
        if number % 2:
            path.write_bytes(content)
        else:
            (layout.serve / "new").write_bytes(content)
            os.replace(layout.serve / "new", path)
        eventually(lambda: got() == (200, content), within=1, what=content.decode())  # noqa: B023
    path.unlink()
    eventually(lambda: got()[0] == 404, within=1)


def test_objects_can_be_written_read_and_deleted(served):
    layout, server = served
    assert ask(server, "MKCOL", "/objects/w")[0] == 201
    assert ask(server, "PUT", "/objects/w/1", b"one")[0] == 201
    assert (objects_folder(layout) / "w" / "1").read_bytes() == b"one"
    (objects_folder(layout) / "w" / "2").write_bytes(b"two")  # as the laptop's own daemon does
    eventually(lambda: ask(server, "GET", "/objects/w/2") == (200, b"two"))
    assert ask(server, "DELETE", "/objects/w/1")[0] == 204
    assert not (objects_folder(layout) / "w" / "1").exists()


def test_nothing_in_serve_can_be_changed(served):
    layout, server = served
    objects_folder(layout).joinpath("mine").write_bytes(b"mine")
    before = files(layout)
    at = server.address.url
    to = {"Destination": f"{at}/serve/train.py", "Overwrite": "T"}
    away = {"Destination": f"{at}/objects/stolen", "Overwrite": "T"}
    tries = [
        ("PUT", "/serve/new", b"x", {}),
        ("PUT", "/serve/train.py", b"x", {}),
        ("DELETE", "/serve/train.py", None, {}),
        ("DELETE", "/serve/sub", None, {}),
        ("DELETE", "/serve/", None, {}),
        ("DELETE", "/serve", None, {}),
        ("MKCOL", "/serve/folder", None, {}),
        ("MOVE", "/serve/train.py", None, {"Destination": f"{at}/serve/moved"}),
        ("MOVE", "/serve/train.py", None, away),
        ("MOVE", "/serve/sub", None, away),
        ("MOVE", "/serve", None, away),
        ("MOVE", "/objects/mine", None, to),
        ("COPY", "/objects/mine", None, to),
        ("COPY", "/serve/train.py", None, {"Destination": f"{at}/serve/copied"}),
        ("PATCH", "/serve/train.py", b"x", {}),
        ("PUT", "/top", b"x", {}),
        ("MKCOL", "/folder", None, {}),
    ]
    for method, path, body, headers in tries:
        status, _ = ask(server, method, path, body, headers)
        assert status >= 400, (method, path, headers, status)
    assert files(layout) == before
    assert not (layout.serve / "folder").exists()
    assert not list((bridge_folder(layout) / "empty").iterdir())


OUTSIDE = [
    "/../.syncd/key", "/serve/../.syncd/key", "/serve/../../.syncd/key", "/objects/../../key",
    "/objects/../password", "/objects/..%2f..%2fkey", "/objects/%2e%2e/%2e%2e/key",
    "/objects/..%5c..%5ckey", "/serve/%2e%2e/in/status.txt", "/serve//../in/status.txt",
    "/serve/..;/in/status.txt", "/.syncd/key", "/in/status.txt", "/store/", "/queue.txt",
    "/objects/./../../key", "/../../../../../../etc/passwd", "/serve/../../../../../etc/passwd",
]  # fmt: skip


@pytest.mark.parametrize("path", OUTSIDE)
def test_nothing_outside_of_the_two_can_be_reached(served, path):
    layout, server = served
    before = files(layout)
    status, body = ask(server, "GET", path)
    assert status in (400, 404), (status, body)
    ask(server, "PUT", f"{path}.new", b"x")
    ask(server, "DELETE", path)
    ask(server, "MOVE", "/objects/", None, {"Destination": f"{server.address.url}{path}"})
    assert files(layout) == before
    assert (bridge_folder(layout) / "rclone.conf").exists()


def test_the_root_lists_the_mounts_and_nothing_else(served):
    _, body = ask(served[1], "PROPFIND", "/", None, {"Depth": "1"})
    assert body.count(b"<D:href>") == 4
    for mount in (b"objects", b"serve", b"bootstrap"):
        assert b"<D:href>/%s/</D:href>" % mount in body


def test_who_deletes_all_objects_takes_nothing_else_and_can_go_on(served):
    layout, server = served
    before = files(layout)
    ask(server, "PUT", "/objects/one", b"1")
    ask(server, "DELETE", "/")
    ask(server, "DELETE", "/objects/")
    assert files(layout) == before
    eventually(lambda: ask(server, "PUT", "/objects/two", b"2")[0] == 201)


def test_a_torn_upload_leaves_no_whole_object_and_can_be_sent_again(served):
    layout, server = served
    head = "PUT /objects/torn HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n"
    head += f"Authorization: {token()['Authorization']}\r\n\r\n"
    with socket.create_connection((server.address.host, server.address.port)) as connection:
        connection.sendall(head.encode() + b"x" * 300_000)
    torn = objects_folder(layout) / "torn"
    assert not torn.exists() or torn.stat().st_size < 1_000_000
    whole = b"y" * 1_000_000
    eventually(lambda: ask(server, "PUT", "/objects/torn", whole)[0] in (201, 204))
    assert torn.read_bytes() == whole


def test_a_worker_uses_it_by_its_url_alone_and_no_secret_is_told(served, tmp_path, make_file):
    layout, server = served
    name = RemoteAddress(f"{server.address.url}/objects", "syncd", PASSWORD).text()
    with Rclone(tmp_path / "run", config=tmp_path / "none.conf") as rclone:
        remote = RcloneRemote(rclone, name)
        remote.make_root()
        remote.check()
        remote.upload(make_file("object", b"content"), "w-000001/object")
        assert [e.name for e in remote.list("w-000001")] == ["object"]
        assert remote.read("w-000001/object", limit=100) == b"content"
        assert (remote.kind(), remote.local_path()) == ("webdav", None)
        assert (objects_folder(layout) / "w-000001" / "object").read_bytes() == b"content"
        remote.delete_folder("w-000001")
        wrong = RcloneRemote(rclone, name.replace("pass-word", "guessed"))
        with pytest.raises(Fatal, match="paste again what `syncd bridge --show` prints") as caught:
            wrong.list("")
    told = [str(caught.value), repr(remote), (tmp_path / "run" / "rclone.log").read_text()]
    obscured = remote.fs.partition("pass='")[2].partition("'")[0]
    assert obscured
    for text in told:
        assert "guessed" not in text
        assert obscured not in text
        assert PASSWORD not in text


def test_no_command_line_shows_the_password_and_no_file_is_open_to_others(served):
    layout, server = served
    argv = Path(f"/proc/{server.pid}/cmdline").read_bytes().decode()
    assert PASSWORD not in argv
    assert PASSWORD not in (bridge_folder(layout) / "bridge.log").read_text()
    assert stat.S_IMODE(bridge_folder(layout).stat().st_mode) == 0o700
    for name in ("rclone.conf", "bridge.log"):
        assert stat.S_IMODE((bridge_folder(layout) / name).stat().st_mode) == 0o600


def test_one_that_is_killed_is_started_again(served):
    _, server = served
    before = server.pid
    os.kill(before, signal.SIGKILL)
    eventually(lambda: server.pid not in (None, before), within=30)
    assert ask(server, "GET", "/serve/train.py")[0] == 200


def test_one_that_hangs_is_started_again(served):
    _, server = served
    process = server.working(30)
    os.kill(process.pid, signal.SIGSTOP)
    server.kill_if_silent(process, 0.2)
    eventually(lambda: server.pid not in (None, process.pid), within=30)
    assert ask(server, "GET", "/serve/train.py")[0] == 200


LOCK = (
    b'<?xml version="1.0"?><lockinfo xmlns="DAV:"><lockscope><exclusive/></lockscope>'
    b"<locktype><write/></locktype></lockinfo>"
)


@pytest.mark.parametrize("path", ["/", "/objects", "/objects/w%202"])
def test_one_in_which_a_folder_is_locked_for_ever_is_started_again(served, path):
    layout, server = served
    (objects_folder(layout) / "w 2").mkdir(exist_ok=True)
    before = files(layout)
    process = server.working(30)
    forever = {"Depth": "infinity", "Timeout": "Infinite"}
    assert ask(server, "LOCK", path, LOCK, forever)[0] == 200
    assert ask(server, "PUT", "/objects/w%202/object", b"x")[0] == 423
    assert files(layout) == before
    server.kill_if_silent(process, 10)
    eventually(lambda: server.pid not in (None, process.pid), within=30)
    assert ask(server, "PUT", "/objects/w%202/object", b"x")[0] in (201, 204)
    assert server.answers(10)


def test_a_taken_port_is_an_error_that_says_so(laptop):
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = Address("127.0.0.1", other.getsockname()[1])
        with pytest.raises(BusyError, match=r"another program listens there.*--address"):
            make_server(laptop, address=address).start()


def test_another_webdav_server_on_the_port_is_not_taken_for_it(laptop, webdav):
    server = make_server(laptop, address=Address("127.0.0.1", webdav.port))
    with pytest.raises(BusyError):
        server.start()


def test_an_address_of_another_machine_is_refused_with_rclones_reason(laptop):
    with pytest.raises(RemoteError, match="cannot assign requested address"):
        make_server(laptop, address=Address("192.0.2.1", 8766)).start()


def test_two_on_one_folder_are_refused(laptop):
    first = make_server(laptop)
    first.start()
    try:
        with pytest.raises(BusyError, match=r"bridge\.lock: process"):
            make_server(laptop).start()
        assert ask(first, "GET", "/serve/stages.toml")[0] == 200
    finally:
        first.close()


def test_settings_of_rclone_in_the_environment_are_not_for_it(laptop, monkeypatch):
    monkeypatch.setenv("RCLONE_ADDR", "127.0.0.1:1")
    monkeypatch.setenv("RCLONE_HTPASSWD", "/nowhere")
    monkeypatch.setenv("RCLONE_READ_ONLY", "true")
    server = make_server(laptop)
    server.start()
    try:
        assert ask(server, "PUT", "/objects/x", b"1")[0] == 201
    finally:
        server.close()


@pytest.mark.parametrize(
    ("text", "host", "port", "url"),
    [
        ("127.0.0.1:8766", "127.0.0.1", 8766, "http://127.0.0.1:8766"),
        ("[::1]:80", "::1", 80, "http://[::1]:80"),
        ("0.0.0.0:8766", "0.0.0.0", 8766, "http://127.0.0.1:8766"),
        ("localhost:1", "localhost", 1, "http://localhost:1"),
    ],
)
def test_an_address_is_a_host_and_a_port(text, host, port, url):
    address = Address.parse(text)
    assert (address.host, address.port, address.url) == (host, port, url)
    assert address.is_private() is (host != "0.0.0.0")


@pytest.mark.parametrize("text", ["", "8766", ":8766", "host:", "host:x", "host:0", "host:70000"])
def test_what_is_no_address_is_refused(text):
    with pytest.raises(UsageError, match=r"--address 127\.0\.0\.1:8766"):
        Address.parse(text)


def test_it_dies_with_a_bridge_that_is_killed(laptop):
    script = (
        "import sys, threading; from test_server import *\n"
        "server = make_server(Layout(Path(sys.argv[1]))); server.start()\n"
        "print(server.pid, flush=True); threading.Event().wait()"
    )
    paths = os.pathsep.join(
        [str(Path(__file__).parent), str(Path(__file__).parents[2] / "support")]
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(laptop.root)],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": paths},
    )
    with process:
        pid = int(process.stdout.readline())
        process.kill()
    eventually(lambda: not Path(f"/proc/{pid}").exists())
