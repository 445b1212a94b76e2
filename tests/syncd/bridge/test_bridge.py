"""The bridge as a whole, in this process: its password, its URL, its tunnel."""

from __future__ import annotations

import errno
import os
import signal
import stat
import threading
from pathlib import Path

import pytest
from servers import free_port
from waiting import eventually

from protocol.errors import BusyError, ConfigError, DataError, ExitCode, UsageError
from protocol.paths import Layout
from protocol.wire import Role
from syncd.bridge import bridge_folder, current_url, objects_folder, password_file, url_file
from syncd.bridge.bridge import Bridge, served_objects
from syncd.bridge.running import is_running, read_record
from syncd.bridge.server import Address
from syncd.cli import main
from syncd.config import Settings, load_settings

CONTROLLER = Role.CONTROLLER


@pytest.fixture
def told() -> list[str]:
    """The URLs that a bridge told."""
    return []


def make(layout: Layout, told: list[str], **kwargs: str) -> Bridge:
    address = Address("127.0.0.1", free_port())
    return Bridge(layout, objects_folder(layout), address=address, told=told.append, **kwargs)


def test_without_a_tunnel_its_own_address_is_its_url_while_it_runs(laptop, told):
    assert current_url(laptop) is None
    with make(laptop, told) as bridge:
        assert told == [bridge.server.address.url]
        assert current_url(laptop) == f"{told[0]}/objects"
        mode = (bridge_folder(laptop) / "url").stat().st_mode
        assert stat.S_IMODE(mode) == 0o600
    assert current_url(laptop) is None
    bridge.close()


def test_a_url_that_was_given_is_the_one_that_counts(laptop, told):
    with make(laptop, told, url="https://gpu.example.org/bridge/"):
        assert current_url(laptop) == "https://gpu.example.org/bridge/objects"


@pytest.mark.parametrize(
    "url", ["http://gpu.example.org", "gpu.example.org", "https://", "ftp://x"]
)
def test_a_url_that_no_worker_would_take_is_refused(laptop, told, url):
    with pytest.raises(ConfigError):
        make(laptop, told, url=url)


def test_the_password_is_made_once_for_its_owner_alone(laptop, told):
    first, second = make(laptop, told), make(laptop, told)
    assert first.password == second.password
    assert len(first.password) >= 32
    assert stat.S_IMODE(first.password_file.stat().st_mode) == 0o600


def nothing(path: Path) -> None:
    path.write_bytes(b"")


def not_ascii(path: Path) -> None:
    path.write_bytes(b"p\xffss\n")


def two_lines(path: Path) -> None:
    path.write_bytes(b"one\ntwo\n")


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (nothing, "it is empty"),
        (not_ascii, "it is not ASCII text"),
        (two_lines, "it is not one line of text"),
        (Path.mkdir, "Is a directory"),
        (os.mkfifo, "not a regular file"),
    ],
)
def test_a_damaged_password_is_not_replaced_unasked(laptop, damage, why, capsys):
    bridge_folder(laptop).mkdir()
    damage(password_file(laptop))
    assert main(["bridge", "-C", str(laptop.root)]) == ExitCode.CONFIG
    told = capsys.readouterr().err
    assert f"{password_file(laptop)}: {why}. Put back the password" in told


def test_a_tunnels_new_url_is_told_and_published_at_once(laptop, told, cloudflared, quick_retries):
    (cloudflared / "plan").write_text("first-one\nfirst-one\nsecond-one\n")
    with make(laptop, told, tunnel="cloudflared") as bridge:
        for _ in range(2):
            before = eventually(lambda: bridge.tunnel.pid, within=30)
            os.kill(before, signal.SIGKILL)
            eventually(lambda: bridge.tunnel.pid not in (None, before), within=30)  # noqa: B023
        published = "https://second-one.trycloudflare.com/objects"
        eventually(lambda: current_url(laptop) == published, within=30)
    # The same one again is no news.
    assert told == [f"https://{name}.trycloudflare.com" for name in ("first-one", "second-one")]
    assert current_url(laptop) is None


def test_a_second_bridge_leaves_the_first_ones_url_alone(laptop, told):
    with make(laptop, told):
        published = current_url(laptop)
        with pytest.raises(BusyError):
            make(laptop, told).start()
        assert current_url(laptop) == published


def test_nothing_is_left_running_when_the_tunnel_cannot_start(laptop, told, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    bridge = make(laptop, told, tunnel="cloudflared")
    with pytest.raises(UsageError, match="no cloudflared"):
        bridge.start()
    assert bridge.server.pid is None


@pytest.mark.parametrize("text", ["ngrok", "sh:me@host", "Cloudflared"])
def test_an_unknown_kind_of_tunnel_is_refused_with_those_there_are(laptop, told, text):
    with pytest.raises(UsageError, match=r"cloudflared:NAME, ssh:user@host or command"):
        make(laptop, told, tunnel=text)


def test_what_is_served_is_the_controllers_local_remote(laptop, tmp_path):
    assert served_objects(laptop, load_settings(laptop, {}, {})) == objects_folder(laptop)
    elsewhere = Settings(role=CONTROLLER, remote=str(tmp_path / "objects"))
    assert served_objects(laptop, elsewhere) == tmp_path / "objects"


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        (Settings(role=CONTROLLER, remote="drive:syncd"), "init --role controller --bridge"),
        (Settings(role=CONTROLLER, remote="https://u:p@h/objects"), "its remote is https://h/obj"),
        (Settings(role=Role.WORKER, remote="/tmp/x"), "this end is the worker's"),
        (Settings(role=CONTROLLER, remote="/"), "holds the whole shared folder, the key too"),
    ],
)
def test_what_a_bridge_cannot_serve_is_refused(laptop, settings, why):
    with pytest.raises(ConfigError, match=why):
        served_objects(laptop, settings)


def test_a_remote_that_leads_to_the_shared_folder_by_a_link_is_refused(laptop, tmp_path):
    link = tmp_path / "link"
    link.symlink_to(laptop.root)
    with pytest.raises(ConfigError, match="the key too"):
        served_objects(laptop, Settings(role=CONTROLLER, remote=str(link)))


def test_what_a_crash_left_is_no_url(laptop, told, cloudflared):
    (bridge_folder(laptop)).mkdir()
    (bridge_folder(laptop) / "url").write_text("https://old.example/objects\n")
    (cloudflared / "plan").write_text("silent\n")
    with make(laptop, told, tunnel="cloudflared"):
        assert current_url(laptop) is None


def test_a_hanging_server_is_replaced_by_the_bridge_itself(laptop, told, monkeypatch):
    monkeypatch.setattr("syncd.bridge.bridge.LOOK_SECONDS", 0.05)
    monkeypatch.setattr("syncd.bridge.bridge.PROBE_SECONDS", 0.1)
    monkeypatch.setattr("syncd.bridge.bridge.ANSWER_SECONDS", 1.0)
    with make(laptop, told) as bridge:
        before = bridge.server.pid
        os.kill(before, signal.SIGSTOP)
        eventually(lambda: bridge.server.pid not in (None, before), within=30)
        bridge.check()


@pytest.mark.parametrize("damage", [b"\xff\n", b"", b"nonsense\n", None])
def test_a_damaged_url_is_none_and_is_written_anew(laptop, told, monkeypatch, damage):
    monkeypatch.setattr("syncd.bridge.bridge.LOOK_SECONDS", 0.05)
    path = url_file(laptop)
    with make(laptop, told, url="https://gpu.example.org") as bridge:
        path.unlink()
        if damage is not None:
            path.write_bytes(damage)
        eventually(lambda: current_url(laptop) == "https://gpu.example.org/objects")
        bridge.check()
    assert told == ["https://gpu.example.org"]


def test_what_is_in_the_place_of_the_url_is_told_and_is_none(laptop, told, monkeypatch, caplog):
    monkeypatch.setattr("syncd.bridge.bridge.LOOK_SECONDS", 0.05)
    bridge_folder(laptop).mkdir()
    url_file(laptop).mkdir()
    with make(laptop, told) as bridge:
        assert told == [bridge.server.address.url]
        assert current_url(laptop) is None
        url_file(laptop).rmdir()
        eventually(lambda: current_url(laptop))
    assert caplog.text.count(f"{url_file(laptop)}: Is a directory") == 1
    os.mkfifo(url_file(laptop))
    assert current_url(laptop) is None


def test_a_url_that_cannot_be_told_now_is_told_later(laptop, monkeypatch, caplog):
    monkeypatch.setattr("syncd.bridge.bridge.LOOK_SECONDS", 0.05)
    full = [OSError(errno.ENOSPC, "No space left on device")] * 5
    told: list[str] = []

    def tell(url: str) -> None:
        if full:
            raise full.pop()
        told.append(url)

    address = Address("127.0.0.1", free_port())
    with Bridge(laptop, objects_folder(laptop), address=address, told=tell) as bridge:
        eventually(lambda: told == [address.url])
        bridge.check()
    assert caplog.text.count("the output: No space left on device") == 1


def test_it_ends_while_what_it_looks_at_hangs_for_ever(laptop, told, monkeypatch):
    monkeypatch.setattr("syncd.bridge.bridge.STOP_SECONDS", 0.2)
    monkeypatch.setattr("syncd.child.STOP_SECONDS", 0.5)
    asked, never = threading.Event(), threading.Event()

    def hang(realm: str, url: str) -> bool:
        asked.set()
        return never.wait()

    monkeypatch.setattr("syncd.bridge.bridge.asks_for", hang)
    bridge = make(laptop, told, tunnel="command:sh -c 'echo http://localhost:1; sleep 1000'")
    ending = threading.Thread(target=bridge.close, daemon=True)
    bridge.start()
    assert asked.wait(30)
    ending.start()
    eventually(lambda: not ending.is_alive(), within=60)
    never.set()
    assert bridge.server.closed


def test_one_whose_folder_was_moved_away_ends_and_leaves_the_next_one_alone(laptop, told):
    first, second = make(laptop, told), make(laptop, told)
    first.start()
    bridge_folder(laptop).rename(laptop.root / "moved")
    second.start()
    try:
        with pytest.raises(DataError, match=r"was moved or replaced while it ran\. Start the"):
            first.check()
        first.close()
        assert current_url(laptop) == f"{second.server.address.url}/objects"
        assert second.server.answers(10)
    finally:
        first.close()
        second.close()


def test_it_notices_by_itself_that_its_folder_was_moved_away(laptop, told, monkeypatch, caplog):
    monkeypatch.setattr("syncd.bridge.bridge.LOOK_SECONDS", 0.05)
    with make(laptop, told) as bridge:
        bridge_folder(laptop).rename(laptop.root / "moved")
        eventually(lambda: bridge.server.closed)
        assert "moved or replaced while it ran" in caplog.text
        with pytest.raises(DataError, match="moved or replaced"):
            bridge.check()


def test_a_fault_in_what_looks_after_it_is_no_secret(laptop, monkeypatch):
    monkeypatch.setattr("syncd.bridge.bridge.LOOK_SECONDS", 0.05)
    with make(laptop, []) as bridge:
        monkeypatch.setattr(bridge, "_look", lambda: 1 // 0)
        eventually(lambda: bridge.server.closed)
        with pytest.raises(ZeroDivisionError):
            bridge.check()


def test_the_folder_may_be_a_path_with_blanks(tmp_path: Path, told):
    layout = Layout(tmp_path / "a folder, with 'all' sorts")
    layout.serve.mkdir(parents=True)
    with make(layout, told):
        assert told


def test_what_it_leaves_says_whether_its_url_has_changed(laptop, cloudflared, quick_retries):
    (cloudflared / "plan").write_text("first-one\nfirst-one\nsecond-one\n")
    records = []
    for _ in range(3):
        told: list[str] = []
        with make(laptop, told, tunnel="cloudflared"):
            eventually(lambda told=told: told, within=60)
            assert is_running(laptop)
        records.append(read_record(laptop))
    assert not is_running(laptop)
    assert [record.url for record in records] == [
        f"https://{name}.trycloudflare.com" for name in ("first-one", "first-one", "second-one")
    ]
    assert [record.changed > 0 for record in records] == [False, False, True]
    assert not records[0].fixed


def test_a_damaged_note_of_the_one_before_keeps_none_from_starting(laptop):
    with make(laptop, []):
        pass
    path = laptop.private / "bridge" / "bridge.json"
    path.write_bytes(b"{")
    with pytest.raises(DataError):
        read_record(laptop)
    with make(laptop, []):
        assert read_record(laptop).fixed
