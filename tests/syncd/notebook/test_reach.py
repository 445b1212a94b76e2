"""A cell is only made for what its machine can reach; what is doubtful is said at the laptop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from protocol.errors import ConfigError, ExitCode, RemoteError, UsageError
from protocol.paths import Layout
from protocol.publish import make_dirs, publish_bytes
from protocol.wire import Role
from syncd.bridge import objects_folder, password_file, url_file
from syncd.bridge.running import Record
from syncd.cli import main
from syncd.config import Settings, load_settings
from syncd.notebook.cell import Platform
from syncd.notebook.reach import Reach, Way, find_reach
from syncd.platform import exclusive_lock
from syncd.setup import initialise

CONFIG = "[dav]\ntype = alias\nremote = /nowhere\n\n[other]\ntype = alias\nremote = /nowhere\n"
FAR = [Platform.COLAB, Platform.KAGGLE]
HERE = "http://127.0.0.1:8766"


@pytest.fixture
def laptop(tmp_path: Path) -> Layout:
    """A controller's end whose remote is `dav:syncd`."""
    config = tmp_path / "rclone.conf"
    config.write_text(CONFIG)
    layout = Layout(tmp_path / "laptop")
    initialise(layout, role=Role.CONTROLLER, remote="dav:syncd", rclone_config=str(config))
    return layout


@pytest.fixture
def bridged(tmp_path: Path) -> Layout:
    """A controller's end that is reached by its bridge, which has run at a loopback address."""
    layout = Layout(tmp_path / "bridged")
    initialise(layout, role=Role.CONTROLLER, remote=str(objects_folder(layout)))
    make_dirs(objects_folder(layout))
    publish_bytes(password_file(layout), b"hunter2\n")
    publish_bytes(url_file(layout), f"{HERE}/objects\n".encode())
    Record(address=HERE, url=HERE).save(layout)
    return layout


def reach(layout: Layout, settings: Settings | None = None, **way: object) -> Reach:
    settings = settings or load_settings(layout, {}, {})
    return find_reach(layout, settings, Way(**{"platform": Platform.COLAB, **way}))  # type: ignore[arg-type]


@pytest.mark.parametrize("platform", FAR)
@pytest.mark.parametrize("remote", ["/home/me/drive", "drive", "./drive", "~/drive"])
def test_a_local_folder_is_no_remote_for_a_vm_however_it_is_written(
    laptop: Layout, platform: Platform, remote: str
) -> None:
    with pytest.raises(UsageError, match="a folder of this machine, which a VM does not see"):
        reach(laptop, platform=platform, remote=remote)


@pytest.mark.parametrize(("remote", "meant"), [("dav", "dav:"), ("dav/sub/x", "dav:sub/x")])
def test_a_forgotten_colon_is_found(laptop: Layout, remote: str, meant: str) -> None:
    with pytest.raises(UsageError) as caught:
        reach(laptop, remote=remote)
    assert f"Did you mean `{meant}`?" in str(caught.value)


def test_a_local_folder_as_the_second_remote_is_no_better(laptop: Layout) -> None:
    settings = replace(load_settings(laptop, {}, {}), fallback=("/home/me/drive",))
    with pytest.raises(ConfigError, match="which a VM does not see"):
        reach(laptop, settings)


def test_for_jupyter_a_local_folder_is_made_absolute(
    laptop: Layout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found = reach(laptop, platform=Platform.JUPYTER, remote="drive")
    assert found.remotes == (str(tmp_path / "drive"),)
    assert any("a folder of this machine" in note for note in found.notes)


def test_another_remote_than_this_ends_own_is_noted(laptop: Layout) -> None:
    (note,) = reach(laptop, remote="other:").notes
    assert "other: is no remote of this end" in note
    assert "the same place as dav:syncd" in note
    assert reach(laptop, remote="dav:syncd").notes == ()
    second = replace(load_settings(laptop, {}, {}), fallback=("other:",))
    assert reach(laptop, second, remote="other:").notes == ()
    assert reach(laptop, second).remotes == ("dav:syncd", "other:")


@pytest.mark.parametrize("platform", FAR)
def test_a_bridge_of_this_machine_alone_is_none_for_a_vm(
    bridged: Layout, platform: Platform
) -> None:
    with (
        exclusive_lock(bridged.private / "bridge" / "bridge.lock", "bridge"),
        pytest.raises(UsageError, match="which a VM does not reach") as caught,
    ):
        reach(bridged, platform=platform)
    assert "--tunnel" in str(caught.value)
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "localhost", "[::1]"])
def test_neither_is_a_url_that_says_so(bridged: Layout, host: str) -> None:
    with pytest.raises(UsageError, match="which a VM does not reach"):
        reach(bridged, url=f"http://{host}:8766")


def test_for_jupyter_that_is_noted(bridged: Layout) -> None:
    found = reach(bridged, platform=Platform.JUPYTER, url=HERE)
    assert found.remotes == ("http://syncd:hunter2@127.0.0.1:8766/objects",)
    (note,) = found.notes
    assert "no other one reaches it" in note
    assert "hunter2" not in note


@pytest.mark.parametrize(
    "url", ["example.org", "ftp://example.org", "https://", "https://u:p@example.org", "http://a b"]
)
def test_a_url_that_is_no_bridges_is_refused(bridged: Layout, url: str) -> None:
    with pytest.raises(UsageError, match="--url"):
        reach(bridged, url=url)


@pytest.mark.parametrize("end", ["", "/", "/objects", "/objects/"])
def test_a_bridges_url_may_be_pasted_as_it_is_printed(bridged: Layout, end: str) -> None:
    found = reach(bridged, url=f"https://example.org{end}")
    assert found == Reach(remotes=("https://syncd:hunter2@example.org/objects",), notes=())


def test_a_bridge_that_does_not_run_is_asked_for(bridged: Layout) -> None:
    with pytest.raises(RemoteError, match="no bridge runs for this folder"):
        reach(bridged)


# The command


@pytest.fixture
def command(
    laptop: Layout, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    def run(*words: str) -> tuple[int, str, str]:
        code = main(["bootstrap", "--folder", str(laptop.root), *words])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def test_a_time_to_stop_after_that_is_none_is_refused_at_the_laptop(
    command: Callable[..., tuple[int, str, str]], laptop: Layout
) -> None:
    code, out, errors = command("--platform", "colab", "--stop-when-idle", "abc")
    assert (code, out) == (ExitCode.USAGE, "")
    assert "--stop-when-idle 'abc'" in errors
    assert not list(laptop.root.glob("*.ipynb"))


def test_without_a_platform_it_is_said_which_there_are(
    command: Callable[..., tuple[int, str, str]],
) -> None:
    code, _, errors = command()
    assert code == ExitCode.USAGE
    assert "--platform" in errors
    assert "colab, kaggle, jupyter" in errors
