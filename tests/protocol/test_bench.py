import pytest

from protocol.bench import Figure, Report, machine, meets
from protocol.schema import decode, dumps, loads


@pytest.mark.parametrize(
    ("value", "goal", "met"),
    [
        (1.5, "<= 1.5", True),
        (1.51, "<= 1.5", False),
        (0.8, ">= 0.8", True),
        (0.79, ">= 0.8", False),
        (8192, "<= 8192", True),
        (30, "< 30", False),
        (6.1, ">6", True),
    ],
)
def test_a_goal_is_a_number_with_its_sense(value, goal, met):
    assert meets(value, goal) is met
    assert Figure(name="n", value=value, unit="s", goal=goal).met is met


@pytest.mark.parametrize("goal", ["1.5", "<= fast", "=< 1", "<= 1.5 s", "<= -1", "<= 1 or 2"])
def test_what_is_no_goal_is_refused(goal):
    with pytest.raises(ValueError, match="not a number with its sense"):
        Figure(name="n", value=1.0, unit="s", goal=goal)


def test_a_figure_without_a_goal_neither_meets_nor_misses_it():
    assert Figure(name="n", value=1.0, unit="s").met is None


def test_a_baseline_has_a_value_and_a_name():
    for half in ({"baseline": 1.0}, {"baseline_name": "rclone copy"}):
        with pytest.raises(ValueError, match="a value and a name"):
            Figure(name="n", value=1.0, unit="s", **half)


def test_a_figure_stands_once_beside_each_of_its_baselines():
    figure = Figure(name="n", value=1.0, unit="s", goal="<= 2")
    found = figure.beside({"a": 3.0, "b": 4.0})
    assert [(f.name, f.baseline_name, f.baseline) for f in found] == [
        ("n", "a", 3.0),
        ("n", "b", 4.0),
    ]
    assert figure.beside({}) == [figure]


def test_a_report_has_the_documented_form():
    report = Report(
        bench="link",
        machine={"cores": "2"},
        figures=(Figure(name="n", value=1.0, unit="s", goal="<= 2"),),
    )
    assert report.to_json() == {
        "bench": "link",
        "machine": {"cores": "2"},
        "figures": [
            {
                "name": "n",
                "value": 1.0,
                "unit": "s",
                "goal": "<= 2",
                "met": True,
                "baseline": None,
                "baseline_name": "",
            }
        ],
    }


def test_a_report_is_read_back_and_what_is_met_is_computed_anew():
    figures = tuple(Figure(name="n", value=3.0, unit="s", goal="<= 2").beside({"a": 4.0}))
    report = Report(bench="link", machine=machine(), figures=figures)
    value = report.to_json()
    value["figures"][0]["met"] = True
    read = decode(Report, loads(dumps(value)))
    assert read == report
    assert read.figures[0].met is False


def test_the_machine_is_described_by_texts():
    found = machine()
    assert {"system", "processor", "cores", "python", "date"} <= set(found)
    assert all(isinstance(value, str) and value for value in found.values())
