import sys

import pytest
from waiting import eventually

from syncd.bench.baselines import config_file, old_waits, rclone, scripted, transfer_seconds
from syncd.bench.samples import p50, p95
from syncd.bench.server import serve_webdav


def test_the_old_system_waits_half_its_period_at_the_median_and_then_carries():
    waits = old_waits(30.0, [0.2, 0.2])
    assert p50(waits) == pytest.approx(15.2)
    assert p95(waits) == pytest.approx(28.7, abs=0.2)
    assert min(waits) > 0.2
    assert max(waits) < 30.2


def test_files_are_carried_as_the_old_daemons_did(tmp_path):
    (tmp_path / "served").mkdir()
    (tmp_path / "served" / "queue.txt").write_text("run:a\n")
    with serve_webdav(tmp_path / "served", tmp_path / "cache") as server:
        got = transfer_seconds(server, server.port, "queue.txt", body=None, count=2)
        put = transfer_seconds(server, server.port, "a.log", body=b"a line\n", count=1)
    assert len(got) == 2
    assert len(put) == 1
    assert (tmp_path / "served" / "a.log").read_bytes() == b"a line\n"


def test_the_scripted_loop_runs_a_line_and_brings_its_log_back(tmp_path):
    stages = {"hello": [sys.executable, "-c", "print('hello')"]}
    with scripted(tmp_path, stages, far=False) as (loop, _, link):
        loop.append("run:hello")
        log = loop.log("hello")
        eventually(lambda: log.exists() and log.read_text() == "hello\n", within=60)
        loop.finish(1)
        assert link.requests > 0


def test_the_scripted_loop_serves_a_laptop_that_is_away_as_well(tmp_path):
    stages = {"hello": [sys.executable, "-c", "print('hello')"]}
    with scripted(tmp_path, stages, far=True) as (loop, _, _):
        loop.append("run:hello")
        log = loop.log("hello")
        assert not log.is_relative_to(tmp_path / "served")
        eventually(lambda: log.exists() and log.read_text() == "hello\n", within=60)


def test_rclone_copies_by_a_configuration_of_ours(tmp_path):
    (tmp_path / "served").mkdir()
    source = tmp_path / "a.txt"
    source.write_text("a")
    with serve_webdav(tmp_path / "served", tmp_path / "cache") as server:
        config = config_file(tmp_path / "rclone.conf", server.section(server.port))
        assert config.stat().st_mode & 0o077 == 0
        rclone(config, "copy", source, "there:", check=True)
    assert (tmp_path / "served" / "a.txt").read_text() == "a"
