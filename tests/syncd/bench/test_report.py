import json
import subprocess
import sys

import pytest

from protocol.bench import Figure, Report
from protocol.errors import DataError
from syncd.bench.report import markdown, number, print_table, read_report, rows, unmet
from syncd.show import plain_console

REPORT = Report(
    bench="link",
    machine={"cores": "2", "system": "Linux 6"},
    figures=(
        *Figure(name="append, p50", value=0.61234, unit="s", goal="<= 1.0").beside(
            {"a loop": 2.5, "the old system": 15.2}
        ),
        Figure(name="speed", value=0.5, unit="ratio", goal=">= 0.8"),
        Figure(name="bytes", value=6994, unit="bytes"),
    ),
)


def test_a_figure_is_one_row_with_all_its_baselines():
    found = list(rows(REPORT.figures))
    assert [row.figure.name for row in found] == ["append, p50", "speed", "bytes"]
    assert found[0].baselines == (("a loop", 2.5), ("the old system", 15.2))
    assert [row.verdict for row in found] == ["yes", "no", ""]


def test_only_what_misses_its_goal_is_unmet():
    assert unmet(REPORT) == ["speed"]


@pytest.mark.parametrize(
    ("value", "unit", "told"),
    [(0.61234, "s", "0.612 s"), (6994, "bytes", "6,994 bytes"), (0.4, "ratio", "0.4")],
)
def test_numbers_have_three_digits_and_their_unit(value, unit, told):
    assert number(value, unit) == told


def test_markdown_is_what_the_documentation_takes():
    assert markdown(REPORT).splitlines() == [
        "Machine: cores 2, system Linux 6.",
        "",
        "| figure | value | goal | met | baselines |",
        "|---|---|---|---|---|",
        "| append, p50 | 0.612 s | <= 1.0 | yes | a loop: 2.5 s; the old system: 15.2 s |",
        "| speed | 0.5 | >= 0.8 | no |  |",
        "| bytes | 6,994 bytes |  |  |  |",
    ]


def test_the_table_shows_each_figure(capsys):
    print_table(plain_console(), REPORT)
    shown = capsys.readouterr().out
    assert all(word in shown for word in ("append, p50", "the old system", "6,994", "cores 2"))


def test_a_kept_report_is_printed_as_markdown(tmp_path):
    path = tmp_path / "bench.json"
    path.write_text(json.dumps(REPORT.to_json()))
    done = subprocess.run(
        [sys.executable, "-m", "syncd.bench.report", str(path)], capture_output=True, check=True
    )
    assert done.stdout.decode() == markdown(REPORT)


@pytest.mark.parametrize("text", ["", "[]", '{"bench": "link"}', '{"figures": 1}'])
def test_what_is_no_report_is_refused_by_name(tmp_path, text):
    path = tmp_path / "bench.json"
    path.write_text(text)
    with pytest.raises(DataError, match=r"bench\.json"):
        read_report(path)


def test_a_report_that_is_not_there_is_a_users_error(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "syncd.bench.report", str(tmp_path / "none.json")],
        capture_output=True,
        check=False,
    )
    assert done.returncode == DataError.exit_code
    assert b"No such file" in done.stderr
