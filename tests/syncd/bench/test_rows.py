"""Each kind of row, as small as it can be, with real daemons; what it finds, not how quick."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from protocol.bench import Figure
from protocol.errors import RunFailedError, UsageError
from syncd.bench import bulk, latency, traffic
from syncd.bench.command import link
from syncd.bench.link import OWN_ROWS, ROWS, chosen, run
from syncd.bench.own import below, http_calls, scratch
from syncd.bench.place import Place
from syncd.bench.samples import Scale
from syncd.bench.server import until
from syncd.bench.world import Route, stages_text
from syncd.rclone.rcd import Rclone
from syncd.rclone.remote import RcloneRemote

TINY = Scale(
    samples=2,
    baseline_samples=2,
    log_seconds=2.0,
    slow_log_seconds=2.0,
    bar_seconds=1.0,
    large_log=1 << 20,
    idle_after=1.0,
    idle_seconds=2.0,
    first_appends=1,
    large_file=1 << 20,
    bursts=2,
    served_files=120,
)


@pytest.fixture
def place(tmp_path):
    return Place(folder=tmp_path / "row", scale=TINY, say=lambda text: None)


def test_an_appended_line_is_followed_to_its_stage(place):
    found = latency.append_to_start(place, Route.BRIDGE)
    goals = {f.name: f.goal for f in found if f.goal}
    assert goals == {
        "line appended to stage started, p50 of 2": "<= 1.0",
        "line appended to stage started, p95 of 2": "<= 1.5",
    }
    assert len({f.baseline_name for f in found if f.baseline_name}) == 2
    parts = [f for f in found if not f.goal]
    assert len(parts) == 6
    assert all(f.value >= 0 for f in found)
    assert not (place.folder / "world").exists()


@pytest.mark.long
def test_what_a_log_costs_is_counted_at_the_remote_and_on_the_wire(place):
    found = traffic.text_log(place, 64 * traffic.KIB, goals=("<= 0.3", "<= 0.4"))
    bodies, wire = found[0], found[1]
    assert 0 < bodies.value < wire.value
    assert bodies.baseline is not None
    assert bodies.baseline >= 1  # a loop sends each byte at least once


@pytest.mark.long
def test_every_served_file_is_counted_where_it_arrives(place):
    found = {f.name: f for f in bulk.many_files(place)}
    assert found["120 files in serve/: arrived of them"].value == 1.0


def test_a_burst_is_uploaded_whole(place):
    found = bulk.burst(place)
    assert found[0].value > 0
    assert {f.baseline_name for f in found} == {
        "rclone copy",
        "one PUT after another (old system)",
    }


def test_a_row_that_fails_is_named_and_keeps_no_other_away(place):
    def fails(place: Place) -> list[object]:
        return until(lambda: None, "nothing", seconds=0.01)

    rows = {"bad": fails, "good": lambda place: [figure]}
    figure = Figure(name="n", value=1.0, unit="s")
    outcomes = list(run(rows, place))
    assert [o.row for o in outcomes] == ["bad", "good"]
    assert "nothing did not come about" in outcomes[0].failure
    assert outcomes[1].figures == [figure]


def test_what_does_not_come_about_is_an_error_that_says_what():
    with pytest.raises(RunFailedError, match="the moon did not come about within 0 s"):
        until(lambda: False, "the moon", seconds=0.01)


def test_rows_are_chosen_by_name_in_their_own_order():
    assert list(chosen(["log", "append"], ROWS)) == ["append", "log"]
    assert list(chosen([], OWN_ROWS)) == list(OWN_ROWS)
    with pytest.raises(UsageError, match="append-far"):
        chosen(["fast"], ROWS)


def _leave_early(remote: Path, folder: Path) -> None:
    with (
        scratch(str(remote), folder / "rclone", config=None) as made,
        Rclone(folder / "other") as rclone,
    ):
        RcloneRemote(rclone, made).upload(remote / "of the user", "w/object")
        assert len(list(remote.iterdir())) == 2
        raise KeyboardInterrupt


def test_a_scratch_folder_is_gone_afterwards_also_after_an_interrupt(tmp_path):
    remote = tmp_path / "remote"
    remote.mkdir()
    (remote / "of the user").write_text("stays")
    with pytest.raises(KeyboardInterrupt):
        _leave_early(remote, tmp_path)
    assert [p.name for p in remote.iterdir()] == ["of the user"]


@pytest.mark.parametrize(
    ("remote", "named"),
    [("drive:", "drive:x"), ("drive:a", "drive:a/x"), ("/srv/a", "/srv/a/x"), ("/a/", "/a/x")],
)
def test_a_folder_of_a_remote_is_named_as_rclone_does(remote, named):
    assert below(remote, "x") == named


def test_http_calls_are_read_from_rclones_metrics():
    text = (
        "# HELP rclone_http_status_code calls\n"
        'rclone_http_status_code{code="207",host="h",method="PROPFIND"} 12\n'
        'rclone_http_status_code{code="201",host="h",method="PUT"} 3\n'
        'promhttp_metric_handler_requests_total{code="200"} 5\n'
    )
    assert http_calls(text) == 15


def test_stages_are_written_as_toml():
    text = stages_text({"a": ["python", "-c", 'print("x")']})
    assert tomllib.loads(text)["stages"]["a"]["command"] == ["python", "-c", 'print("x")']


def test_the_help_and_the_documentation_name_every_row():
    listed = (link.__doc__ or "").partition("only\n")[2].partition("    remote\n")[0]
    documented = (Path(__file__).parents[3] / "docs" / "benchmarks.md").read_text("utf-8")
    line = documented.partition("`--only` takes ")[2].partition("\n\n")[0]
    for text in (listed, line):
        every, own = (set(re.findall(r"[a-z][a-z-]+", part)) for part in text.split("--remote"))
        assert ROWS.keys() <= every
        assert OWN_ROWS.keys() <= own
        assert (ROWS.keys() - OWN_ROWS.keys()).isdisjoint(own)
