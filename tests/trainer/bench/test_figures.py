from trainer.bench.contestant import Contestant, Part
from trainer.bench.figures import USUAL, race_figures


def contestant(name, part):
    return Contestant(name=name, part=part, start=lambda plan: iter(()))


CONTESTANTS = [
    contestant("memcpy", Part.FLOOR),
    contestant("kernel, numba", Part.OURS),
    contestant("loader, numba", Part.OURS),
    contestant("loader, numpy", Part.OURS),
    contestant(USUAL, Part.PEER),
    contestant("quick", Part.PEER),
    contestant("fallen", Part.PEER),
    contestant("grain", Part.FED),
]
MS = {
    "floor: memcpy": 0.05,
    "ours: kernel, numba": 0.1,
    "ours: loader, numba": 0.2,
    "ours: loader, numpy": 0.7,
    f"peer: {USUAL}": 8.0,
    "peer: quick": 1.0,
    "fed with our rows: grain": 0.5,
}


def test_ours_is_held_against_memcpy_and_against_peers():
    figures = {figure.name: figure for figure in race_figures(CONTESTANTS, MS)}
    found = {name: (round(f.value, 6), f.goal, f.met) for name, f in figures.items() if f.goal}
    assert found == {
        "ours: kernel, numba, against memcpy": (2.0, "<= 2.5", True),
        "ours: loader, numba, against memcpy": (4.0, "<= 5", True),
        "ours: loader, numpy, against memcpy": (14.0, "<= 12", False),
        "ours: loader, times faster than the fastest peer": (5.0, ">= 10", False),
        "ours: loader, times faster than the usual loader": (40.0, ">= 30", True),
    }
    fastest = figures["ours: loader, times faster than the fastest peer"]
    assert fastest.baseline_name == "quick"


def test_everybody_stands_in_a_part_the_fastest_first_and_beside_memcpy():
    told = [f for f in race_figures(CONTESTANTS, MS) if f.unit == "ms a batch"]
    assert [figure.name for figure in told] == [
        "ours: kernel, numba",
        "ours: loader, numba",
        "ours: loader, numpy",
        "peer: quick",
        f"peer: {USUAL}",
        "fed with our rows: grain",
    ]
    assert {(figure.baseline_name, figure.baseline) for figure in told} == {("memcpy", 0.05)}


def test_without_peers_there_is_nothing_to_be_faster_than():
    alone = [c for c in CONTESTANTS if c.part in (Part.FLOOR, Part.OURS)]
    names = [figure.name for figure in race_figures(alone, MS)]
    assert not [name for name in names if "faster" in name]
