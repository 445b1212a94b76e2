"""Measures a few things in turns, and takes the median of each; the floor that copies set."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

ROUNDS = 7
PAGE = 4096


def seconds(work: Callable[[], object]) -> float:
    """Return how long one call takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def medians(measures: Mapping[str, Callable[[], float]], rounds: int = ROUNDS) -> dict[str, float]:
    """Return the median of what each measure returns, all of them called once in each round."""
    found: dict[str, list[float]] = {name: [] for name in measures}
    for _ in range(rounds):
        for name, measure in measures.items():
            found[name].append(measure())
    return {name: statistics.median(values) for name, values in found.items()}


def mapped(paths: Sequence[Path]) -> list[NDArray[np.uint8]]:
    """Return the bytes of files, mapped, and every page touched: no copy of them waits for that."""
    maps = [np.memmap(path, dtype=np.uint8, mode="r") for path in paths]
    for each in maps:
        each[::PAGE].max()
    return [np.asarray(each) for each in maps]


def pieces(
    maps: Sequence[NDArray[np.uint8]], sizes: Sequence[int], rng: np.random.Generator
) -> list[NDArray[np.uint8]]:
    """Return a piece of each of these sizes, from a random place of a random map."""
    chosen = rng.integers(0, len(maps), len(sizes)).tolist()
    places = rng.random(len(sizes)).tolist()
    found = []
    for size, which, place in zip(sizes, chosen, places, strict=True):
        at = int(place * (len(maps[which]) - size))
        found.append(maps[which][at : at + size])
    return found
