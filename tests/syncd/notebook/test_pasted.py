"""What the cell's own text does: it looks for the key, and fetches."""

from __future__ import annotations

import getpass
import hashlib
import http.server
import os
import stat
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from syncd.config import Key
from syncd.notebook import pasted
from syncd.notebook.sealed import lock, seal


def typing_in(monkeypatch: pytest.MonkeyPatch, answers: Sequence[str]) -> list[str]:
    """Have somebody type these answers; return the prompts that they are shown."""
    left, prompts = list(answers), []

    def ask(prompt: str) -> str:
        prompts.append(prompt)
        if not left:
            raise EOFError
        return left.pop(0)

    monkeypatch.setattr(getpass, "getpass", ask)
    return prompts


@pytest.fixture(autouse=True)
def no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SYNCD_KEY", raising=False)


def options(folder: Path, key: Key, **more: object) -> dict[str, object]:
    return {"folder": str(folder), "shared": key.folder, "hint": "ask the laptop", **more}


# The key


def test_what_is_wrong_with_a_key_is_said_with_where_it_was_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    key, folder = Key.new(), tmp_path / "syncd"
    other = Key.new()
    before = Key(key.folder, Key.new().secret)
    (folder / ".syncd").mkdir(parents=True)
    (folder / ".syncd" / "key").write_text(other.text())
    (tmp_path / ".syncd-key").write_text("hunter2")
    monkeypatch.setenv("SYNCD_KEY", before.text())
    prompts = typing_in(monkeypatch, ["hunter2", key.text()])
    found, secret, told = pasted.syncd_open(folder, lock(key.secret, "it"), options(folder, key))
    assert (found, secret, told) == (key.text(), key.secret, "it")
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 4
    assert said[0].startswith("the environment's SYNCD_KEY: a key of this shared folder, but not")
    assert said[1] == f"{tmp_path / '.syncd-key'}: no key of ours, which begins with syncd1."
    assert said[2].startswith(f"{folder / '.syncd' / 'key'}: the key of another shared folder, ")
    assert other.folder in said[2]
    assert said[3].startswith("what was typed in: no key")
    assert [prompt.count("a line of .syncd/key") for prompt in prompts] == [1, 1]
    assert ["3 tries left" in prompts[0], "2 tries left" in prompts[1]] == [True, True]
    assert "hunter2" not in "".join(said)


def test_either_line_of_a_key_that_is_being_rotated_will_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = Key.new().rotated()
    monkeypatch.setenv("SYNCD_KEY", key.text())
    for secret in (key.secret, key.previous):
        _, found, _ = pasted.syncd_open(tmp_path, lock(secret, ""), options(tmp_path, key))
        assert found == secret


@pytest.mark.parametrize(("answers", "asked"), [([""], 1), ([], 1), (["x", "y", "z"], 3)])
def test_the_asking_ends_with_an_empty_answer_or_the_third(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answers: list[str], asked: int
) -> None:
    key = Key.new()
    prompts = typing_in(monkeypatch, answers)
    with pytest.raises(pasted.SyncdError, match="No key that opens this cell"):
        pasted.syncd_open(tmp_path, lock(key.secret, ""), options(tmp_path, key))
    assert len(prompts) == asked


def test_no_key_is_asked_for_where_nothing_is_sealed(tmp_path: Path) -> None:
    unsealed = {"folder": str(tmp_path), "shared": ""}
    assert pasted.syncd_open(tmp_path, lock(b"", "it"), unsealed) == ("", b"", "it")


# Fetching


class Turning(http.server.BaseHTTPRequestHandler):
    """Answers each request with the same code, and counts them."""

    code = 401
    requests = 0

    def do_GET(self) -> None:
        type(self).requests += 1
        self.send_error(self.code)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def turning() -> Iterator[type[Turning]]:
    class Here(Turning):
        port = 0

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Here)
    Here.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield Here
    server.shutdown()
    thread.join()
    server.server_close()


def run(key: Key, folder: Path, remotes: Sequence[str]) -> None:
    locked = lock(key.secret, {"remotes": remotes, "rclone": "[hunter3]\n"})
    pasted.syncd_run(locked, options(folder, key))


@pytest.fixture
def key(monkeypatch: pytest.MonkeyPatch) -> Key:
    """A key that the cell finds; and it does not wait between two tries."""
    key = Key.new()
    monkeypatch.setenv("SYNCD_KEY", key.text())
    monkeypatch.setattr(pasted.time, "sleep", lambda seconds: None)
    return key


@pytest.mark.parametrize("code", [401, 403])
def test_a_password_that_is_refused_is_not_tried_again(
    key: Key, turning: type[Turning], tmp_path: Path, code: int
) -> None:
    turning.code = code
    remote = f"http://syncd:hunter2@127.0.0.1:{turning.port}/objects"
    with pytest.raises(pasted.SyncdError, match=f"refuses this cell's password .{code}") as caught:
        run(key, tmp_path, [remote])
    assert turning.requests == 1
    assert "run `syncd bootstrap`" in str(caught.value)
    assert "hunter2" not in str(caught.value)


def test_who_does_not_answer_is_tried_again_which_is_said_once(
    key: Key, turning: type[Turning], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    turning.code = 502
    remote = f"http://syncd:hunter2@127.0.0.1:{turning.port}/objects"
    with pytest.raises(pasted.SyncdError, match="ask the laptop"):
        run(key, tmp_path, [remote])
    assert turning.requests == 3
    shown = f"127.0.0.1:{turning.port}/objects"
    assert capsys.readouterr().out == f"{shown} does not answer; trying again\n"


def test_rclones_configuration_lies_in_a_private_file_that_is_removed(
    key: Key, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = tmp_path / "seen"
    rclone = tmp_path / "bin" / "rclone"
    rclone.parent.mkdir()
    rclone.write_text(
        f'#!/bin/sh\nstat -c %a "$(dirname "$2")" >> {seen}\n'
        f'echo "$2" >> {seen}; cat "$2" >> {seen}\nexit 3\n'
    )
    rclone.chmod(rclone.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{rclone.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(pasted.sys, "executable", str(rclone.parent / "python"))
    folder = tmp_path / "syncd"
    with pytest.raises(pasted.SyncdError):
        run(key, folder, ["hunter3:"])
    mode, config, text, *_ = seen.read_text().splitlines()
    assert (mode, text) == ("700", "[hunter3]")
    assert not Path(config).parent.exists()
    assert not folder.exists(), "nothing is written before it is known whose folder that is"


def test_without_a_notebook_a_failure_is_its_message_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    typing_in(monkeypatch, [])
    key = Key.new()
    with pytest.raises(SystemExit, match="No key that opens this cell"):
        pasted.syncd_start(lock(key.secret, ""), options(tmp_path, key))


def test_while_nothing_answers_what_was_fetched_before_is_gone_on_with(
    key: Key, turning: type[Turning], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    turning.code = 502
    remotes = [f"http://syncd:hunter2@127.0.0.1:{turning.port}/objects"]
    program = b"def start(**given): open(given['options']['folder'] + '/started', 'w').close()\n"
    files = {"start": {"name": "start-1.py", "sha256": hashlib.sha256(program).hexdigest()}}
    kept = tmp_path / ".syncd" / "cell"
    kept.mkdir(parents=True)
    (kept / "manifest.json").write_bytes(seal(key.secret, {"files": files}))
    (kept / "start-1.py").write_bytes(program)
    run(key, tmp_path, remotes)
    assert (tmp_path / "started").exists()
    assert "going on with the manifest.json that was fetched before" in capsys.readouterr().out

    (tmp_path / "started").unlink()
    (kept / "start-1.py").write_bytes(program + b"#")  # not what the manifest names
    with pytest.raises(pasted.SyncdError, match="start cannot be fetched"):
        run(key, tmp_path, remotes)
    (kept / "manifest.json").write_bytes(seal(Key.new().secret, {"files": files}))
    with pytest.raises(pasted.SyncdError, match=r"manifest\.json cannot be fetched"):
        run(key, tmp_path, remotes)
    assert not (tmp_path / "started").exists()
