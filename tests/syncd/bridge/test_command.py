"""`syncd bridge` as a person and a script meet it: what it prints, how it ends."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from bridging import BridgeProcess
from servers import free_port
from waiting import eventually

from protocol.errors import ExitCode
from protocol.paths import Layout
from protocol.wire import Role
from syncd.bridge import objects_folder, read_password
from syncd.bridge.command import running
from syncd.bridge.told import brief_changed_text, changed_text, first_text, worker_remote
from syncd.cli import main
from syncd.config import Key, load_key, load_settings
from syncd.rclone.address import parse_address
from syncd.watching import environment


@pytest.fixture
def bridge(laptop: Layout) -> Iterator[BridgeProcess]:
    process = BridgeProcess(laptop)
    process.start()
    yield process
    process.kill()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_prints_a_line_of_json_when_it_is_ready_and_ends_cleanly(bridge, number):
    [line] = bridge.lines()
    assert line == {
        "url": bridge.url,
        "objects": f"{bridge.url}/objects",
        "serve": f"{bridge.url}/serve",
        "user": "syncd",
        "password_file": str(bridge.layout.private / "bridge" / "password"),
    }
    server = bridge.server_pid()
    assert bridge.stop(number) == 0
    assert not os.path.exists(f"/proc/{server}")


def test_a_second_one_and_a_taken_port_are_busy(bridge, tmp_path, capsys):
    at = f"127.0.0.1:{bridge.port}"
    assert main(["bridge", "-C", str(bridge.layout.root)]) == ExitCode.BUSY
    told = capsys.readouterr().err
    assert "holds the lock" in told
    assert "`syncd bridge --show`" in told
    assert main(["init", "--bridge", "-C", str(tmp_path / "other")]) == 0
    assert main(["bridge", "-C", str(tmp_path / "other"), "--address", at]) == ExitCode.BUSY
    assert "another program listens there" in capsys.readouterr().err


def test_the_password_stays_the_same_over_restarts(bridge):
    remote = bridge.remote
    bridge.kill()
    bridge.start()
    assert bridge.remote == remote


def test_new_urls_of_a_tunnel_are_lines_of_json(laptop, cloudflared):
    (cloudflared / "plan").write_text("first-one\nsecond-one\n")
    process = BridgeProcess(laptop, "--tunnel", "cloudflared")
    try:
        process.start()
        tunnel, *_ = json.loads((laptop.private / "bridge" / "tunnel.pid").read_text())
        os.kill(tunnel, signal.SIGKILL)
        eventually(lambda: len(process.lines()) == 2, within=60)
    finally:
        process.kill()
    urls = [line["url"] for line in process.lines()]
    assert urls == [f"https://{name}.trycloudflare.com" for name in ("first-one", "second-one")]


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["--address", "nowhere"], ExitCode.USAGE),
        (["--tunnel", "pigeon"], ExitCode.USAGE),
        (["--url", "http://gpu.example.org"], ExitCode.CONFIG),
    ],
)
def test_what_cannot_be_is_refused_before_anything_starts(laptop, arguments, code, capsys):
    assert main(["bridge", "-C", str(laptop.root), *arguments]) == code
    assert capsys.readouterr().err.startswith("syncd: error: ")


def test_init_makes_an_end_for_a_bridge(tmp_path, capsys):
    layout = Layout(tmp_path / "end")
    assert main(["init", "--role", "controller", "--bridge", "-C", str(layout.root)]) == 0
    assert "start `syncd watch --bridge`" in capsys.readouterr().out
    assert load_settings(layout, {}, {}).remote == str(objects_folder(layout))
    for wrong in (["--role", "worker"], ["--remote", "drive:"]):
        assert main(["init", "--bridge", *wrong, "-C", str(tmp_path / "x")]) == ExitCode.USAGE


def test_init_takes_the_workers_remote_and_key_from_the_environment(tmp_path, monkeypatch, capsys):
    remote = "https://syncd:a-password@gpu.example.org/objects"
    monkeypatch.setenv("SYNCD_REMOTE", remote)
    monkeypatch.setenv("SYNCD_KEY", Key.new().text())
    layout = Layout(tmp_path / "vm")
    assert main(["init", "--role", "worker", "-C", str(layout.root)]) == 0
    assert "a-password" not in capsys.readouterr().out
    assert stat.S_IMODE(layout.settings.stat().st_mode) == 0o600
    assert load_settings(layout, {}, {}).remote == remote
    # A bridge's URL may change under an end that was at work.
    (layout.private / "state.db").touch()
    monkeypatch.setenv("SYNCD_REMOTE", remote.replace("gpu.", "another."))
    assert main(["init", "--role", "worker", "-C", str(layout.root)]) == 0
    monkeypatch.setenv("SYNCD_REMOTE", str(tmp_path / "elsewhere"))
    assert main(["init", "--role", "worker", "-C", str(layout.root)]) == ExitCode.USAGE
    assert "a-password" not in capsys.readouterr().err


def test_what_is_printed_is_whole_when_the_key_is_shown_and_asks_for_it_when_not(laptop):
    key = load_key(laptop, {})
    remote = worker_remote("https://h", "it's")
    text = first_text(remote, key, show_key=False, key_path=laptop.key)
    assert key.text().strip() not in text
    assert f"the line in {laptop.key}" in text
    shown = first_text(remote, key, show_key=True, key_path=laptop.key)
    assert shown.count(key.text().strip()) == 1
    unsealed = first_text(remote, None, show_key=False, key_path=laptop.key)
    assert "SYNCD_KEY" not in unsealed


def test_what_is_pasted_sets_what_a_worker_needs(laptop, tmp_path):
    remote = worker_remote("https://h", 'it\'s $HOME "x"')
    key = load_key(laptop, {})
    text = first_text(remote, key, show_key=True, key_path=laptop.key)
    blocks = [[line.strip() for line in b.splitlines()] for b in text.split("\n\n") if "    " in b]
    [in_shell] = (block for block in blocks if len(block) > 2)
    say = '\nprintf \'%s\\n\' "$SYNCD_REMOTE" "$SYNCD_KEY"'
    shell = ["sh", "-c", "\n".join(in_shell[:-1]) + say]
    done = subprocess.run(shell, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [remote, key.text().strip()]
    assert in_shell[-1] == "syncd init --role worker --folder syncd && syncd watch --folder syncd"
    assert parse_address(remote).password == 'it\'s $HOME "x"'


def test_what_to_do_when_the_url_changed_is_one_line():
    text = changed_text(worker_remote("https://new", "p"))
    line = "export SYNCD_REMOTE=https://syncd:p@new/objects; syncd init --role worker --folder"
    assert f"    {line}" in text


def test_what_is_pasted_makes_a_worker_that_keeps_remotes_and_key(laptop, tmp_path):
    key, remote = load_key(laptop, {}), worker_remote("https://h", "p")
    second = str(tmp_path)
    text = first_text(remote, key, show_key=True, key_path=laptop.key, fallback=[second])
    lines = [line.strip().partition(" && syncd watch")[0] for line in text.splitlines()]
    begin = next(at for at, line in enumerate(lines) if line.startswith("export"))
    script = lines[begin : lines.index("", begin)]
    run_in(tmp_path, "\n".join(['syncd() { python -m syncd "$@"; }', *script]))
    made = Layout(tmp_path / "syncd")
    settings = load_settings(made, {}, {})
    assert (settings.role, settings.remote, settings.fallback) == ("worker", remote, (second,))
    assert load_key(made, {}) == key

    # A new shell knows nothing of what was exported.
    again = changed_text(worker_remote("https://new", "p")).partition(" && syncd watch")[0]
    run_in(tmp_path, f'syncd() {{ python -m syncd "$@"; }}\n{again.splitlines()[-1].strip()}')
    assert load_settings(made, {}, {}).remote == worker_remote("https://new", "p")
    assert load_key(made, {}) == key


def run_in(folder: Path, script: str) -> None:
    subprocess.run(["sh", "-ec", script], cwd=folder, env=environment(), check=True)


def test_without_a_key_the_worker_is_made_without_one(laptop):
    remote = worker_remote("https://h", "p")
    text = first_text(remote, None, show_key=False, key_path=laptop.key)
    for told in (text, changed_text(remote, sealed=False)):
        assert "syncd init --role worker --unsealed --folder syncd && syncd watch" in told


# --show


def test_a_bridge_that_runs_is_asked_for_what_to_paste(bridge, capsys):
    root = str(bridge.layout.root)
    assert main(["bridge", "--show", "-C", root]) == 0
    shown = capsys.readouterr().out
    assert bridge.remote in shown
    assert load_key(bridge.layout, {}).text().strip() not in shown
    assert main(["bridge", "--show", "--show-key", "-C", root]) == 0
    assert load_key(bridge.layout, {}).text().strip() in capsys.readouterr().out
    assert main(["bridge", "--show", "--json", "-C", root]) == 0
    assert [json.loads(capsys.readouterr().out)] == bridge.lines()
    assert main(["bridge", "--show", "--tunnel", "cloudflared", "-C", root]) == ExitCode.USAGE


def test_what_is_shown_is_what_the_bridge_prints_on_a_terminal(laptop, monkeypatch, capsys):
    at = f"127.0.0.1:{free_port()}"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    with running(laptop, load_settings(laptop, {}, {}), address=at):
        printed = capsys.readouterr().out
        assert main(["bridge", "--show", "-C", str(laptop.root)]) == 0
        assert capsys.readouterr().out == printed
    assert "syncd bootstrap --platform" in printed
    assert "`syncd bridge --show --show-key`" in printed  # `syncd watch --bridge` has no --show-key


def test_what_may_be_kept_in_a_file_has_no_password(laptop, capsys):
    settings, at = load_settings(laptop, {}, {}), f"127.0.0.1:{free_port()}"
    with running(laptop, settings, address=at):
        printed, password = capsys.readouterr().out, read_password(laptop)
        assert f"bridge: http://{at}" in printed
        assert "syncd bootstrap --platform" in printed
        assert "`syncd bridge --show`" in printed
    for told in (printed, brief_changed_text()):
        assert password not in told
        assert "SYNCD_REMOTE" not in told


def test_where_no_bridge_runs_or_its_url_is_not_known_the_remote_is_missing(
    laptop, cloudflared, capsys
):
    show = ["bridge", "--show", "-C", str(laptop.root)]
    assert main(show) == ExitCode.REMOTE
    assert "no bridge runs" in capsys.readouterr().err
    (cloudflared / "plan").write_text("silent\n")
    at = f"127.0.0.1:{free_port()}"
    with running(laptop, load_settings(laptop, {}, {}), address=at, tunnel="cloudflared"):
        assert main(show) == ExitCode.REMOTE
        assert "has told no URL yet" in capsys.readouterr().err
    assert main(show) == ExitCode.REMOTE
    assert "no bridge runs" in capsys.readouterr().err


def test_watch_is_told_role_and_remote_by_the_environment_alone(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("SYNCD_ROLE", Role.WORKER)
    monkeypatch.setenv("SYNCD_REMOTE", "http://u:p@gpu.example.org/objects")
    assert main(["watch", "-C", str(tmp_path / "new")]) == ExitCode.CONFIG
    assert "unencrypted" in capsys.readouterr().err
