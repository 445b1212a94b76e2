import pytest
from reports import REPORT

from protocol.tables import markdown, number, rows, unmet


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
