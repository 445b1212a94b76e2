import dataclasses
import json

import pytest
from rich.console import Console

from protocol.bench import Figure, Report
from protocol.errors import ExitCode
from protocol.schema import decode
from trainer.bench import loader
from trainer.bench.race import Pace
from trainer.bench.report import print_table
from trainer.cli import main


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(loader, "QUICK_ROWS", 400)
    monkeypatch.setattr(loader, "QUICK", Pace(rounds=1, most=2, seconds=9.0, least=1, warm=1))


def bench(folder, *words):
    return main(["bench", "loader", "--quick", "--folder", str(folder), *words])


def test_the_report_is_what_can_be_read_back(small, work, capsys):
    words = ("--only", "race", "plan", "--peers", "fed-torch", "spdl", "--json")
    assert bench(work.folder, *words) == ExitCode.OK
    printed = json.loads(capsys.readouterr().out)
    report = decode(Report, printed)
    assert (report.bench, report.machine["form"]) == ("loader", "quick")
    assert "torch " in report.machine["packages"]
    assert report.to_json() == printed
    names = [figure.name for figure in report.figures]
    assert "ours: loader, numpy, against memcpy" in names
    assert "fed with our rows: DataLoader, 0 workers" in names
    assert "plan: real tokens in the budget, packed" in names


def test_a_peer_that_is_not_installed_is_left_out_and_named(small, work, capsys, monkeypatch):
    away = [dataclasses.replace(peer, needs=("no_such_module",)) for peer in loader.PEERS]
    monkeypatch.setattr(loader, "PEERS", tuple(away))
    assert bench(work.folder, "--only", "race", "--peers", "litdata", "--json") == ExitCode.OK
    found = json.loads(capsys.readouterr().out)
    assert found["machine"]["left out"] == "litdata: no_such_module is not installed"


@pytest.mark.parametrize(
    ("words", "why"),
    [(("--only", "speed"), "no figure 'speed'"), (("--peers", "tfds"), "no peer 'tfds'")],
)
def test_an_unknown_name_is_refused_before_anything_is_written(tmp_path, capsys, words, why):
    assert bench(tmp_path / "new", *words) == ExitCode.USAGE
    assert why in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_the_table_parts_what_is_ours_from_the_others(capsys):
    names = ("ours: a", "ours: b", "peer: c")
    figures = tuple(Figure(name=name, value=1.0, unit="s", goal="< 2") for name in names)
    print_table(Console(width=80), Report(bench="loader", machine={"cores": "2"}, figures=figures))
    lines = [line.split("  ")[0].strip() for line in capsys.readouterr().out.splitlines()]
    assert lines == ["figure", "ours: a", "ours: b", "", "peer: c", "cores 2"]
