"""Google's own client, the real one, as far as it goes without an account.

It needs Python 3.12, so it is no dependency of ours: $SYNCD_TEST_COLAB says where it is, else it is
`colab` on the PATH. In a session's place stands a Jupyter server of this machine, if there is one.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from waiting import eventually

from protocol.errors import RemoteError
from syncd.notebook.colab import Colab, Gpu
from syncd.notebook.session import KEY_THERE, RUNS, TAKE_KEY, TAKEN

NAME = "syncd-abc123"
CELL = f"""
import os, time
print({RUNS!r}, flush=True)
while not os.path.exists("stop"):
    with open("ticks", "a") as file:
        file.write(os.environ["SYNCD_KEY"])
    time.sleep(0.05)
"""


@pytest.fixture
def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Colab:
    """The real client, not logged in."""
    found = os.environ.get("SYNCD_TEST_COLAB") or shutil.which("colab")
    if not found:
        pytest.skip("Google's client is not installed: PyPI google-colab-cli, for Python 3.12")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "100")
    return Colab((found,))


@pytest.fixture
def kernel(client: Colab, tmp_path: Path) -> Iterator[Path]:
    """A Jupyter server, as the client's session NAME; the folder that its kernel works in."""
    program = shutil.which("jupyter-server")
    if not program:
        pytest.skip("there is no Jupyter server on the PATH")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    state = tmp_path / "home/.config/colab-cli/sessions.json"
    state.parent.mkdir(parents=True)
    session = {"name": NAME, "token": "t", "url": url, "endpoint": "e"}
    state.write_text(json.dumps({NAME: session | {"token_expires_at": "2099-01-01T00:00:00Z"}}))
    options = [f"--port={port}", "--ip=127.0.0.1", "--no-browser", "--allow-root"]
    options += ["--IdentityProvider.token=", "--ServerApp.disable_check_xsrf=True"]
    with open(tmp_path / "server.log", "wb") as log:
        server = subprocess.Popen(
            [program, *options, "--ServerApp.root_dir=/"],
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    eventually(lambda: _answers(f"{url}/api"), within=60)
    folder = tmp_path / "kernel"
    folder.mkdir()
    yield folder
    (folder / "stop").touch()
    server.send_signal(signal.SIGTERM)
    server.wait(60)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def test_it_is_the_client_that_we_know(client: Colab) -> None:
    client.check()


@pytest.mark.parametrize(
    ("command", "options"),
    [
        ("new", ["-s", "--gpu", *(gpu for gpu in Gpu if gpu is not Gpu.NONE)]),
        ("exec", ["-s", "-f", "--timeout"]),
        ("upload", ["-s", "local_path", "remote_path"]),
        ("stop", ["-s"]),
        ("sessions", []),
    ],
)
def test_it_knows_each_option_that_it_is_given(
    client: Colab, command: str, options: list[str]
) -> None:
    said = client._call("ask for help", [command, "--help"])
    words = set(re.findall(r"-{0,2}\w+", said))
    assert words >= set(options)


def test_one_that_is_not_logged_in_is_told_from_other_failures(client: Colab) -> None:
    with pytest.raises(RemoteError, match="not logged in"):
        client.create(NAME, Gpu.T4)
    with pytest.raises(RemoteError, match="not logged in"):
        client.sessions()


def test_a_session_that_it_does_not_know_has_ended(client: Colab, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(RemoteError, match="the session has ended"):
        client.upload(NAME, file, "/content/file")


def test_a_kernel_gets_the_key_and_a_cell_that_goes_on_without_the_client(
    client: Colab, kernel: Path, tmp_path: Path
) -> None:
    key, there = tmp_path / "key", kernel / "syncd-key"
    key.write_text("x\n")
    client.upload(NAME, key, str(there))
    said = client.execute(NAME, TAKE_KEY.replace(KEY_THERE, str(there)))
    assert TAKEN in said
    assert not there.exists()

    cell = tmp_path / "cell.py"
    cell.write_text(f"import os\nos.chdir({str(kernel)!r})\n{CELL}")
    attached = client.attach(NAME, cell, tmp_path / "output")
    eventually(lambda: RUNS in attached.lines(), within=60)
    assert attached.code() is None
    attached.leave()
    ticks = kernel / "ticks"
    before = ticks.stat().st_size
    eventually(lambda: ticks.stat().st_size > before, what="it ended with the client")
    assert set(ticks.read_text()) == {"x"}, "the key is in its environment"


def test_code_that_fails_ends_the_client_with_0(
    client: Colab, kernel: Path, tmp_path: Path
) -> None:
    cell = tmp_path / "cell.py"
    cell.write_text("raise SystemExit('manifest.json cannot be fetched')")
    attached = client.attach(NAME, cell, tmp_path / "output")
    eventually(lambda: attached.code() is not None, within=60)
    assert attached.code() == 0
    assert attached.lines() == ["SystemExit: manifest.json cannot be fetched"]
