"""Times contestants in turns: round after round, so that a busy moment hits all of them alike.

In each round everybody is started anew on the same batches of the plan, other ones than in the
round before. The first batches of a turn are drawn off the clock: they start workers and fill
queues. Batches are left over at its end, so that nobody is timed while it only empties its queue.
What counts is the time for as many real tokens as a batch of the plan has on average, because
those who cut batches of their own have more padding in them.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from itertools import islice

import numpy as np

from protocol.errors import DataError
from trainer.bench.batches import Plan, Rows, check, row_numbers
from trainer.bench.contestant import Contestant, Order, Part
from trainer.bench.corpus import Corpus


@dataclass(frozen=True, kw_only=True)
class Pace:
    """How long a race is: each turn ends after `most` batches, or `seconds` and `least` batches."""

    rounds: int
    most: int
    seconds: float
    least: int = 8
    warm: int = 20  # more than any queue here holds

    @property
    def segment(self) -> int:
        """How many batches of the plan one turn may need."""
        return 2 * self.warm + self.most


FULL = Pace(rounds=7, most=1024, seconds=1.5)
QUICK = Pace(rounds=3, most=256, seconds=0.4)


@dataclass(kw_only=True)
class Standings:
    """What came of a race: seconds a real token for each turn, by contestant; who fell out, why."""

    turns: dict[str, list[float]] = field(default_factory=dict)
    fallen: dict[str, str] = field(default_factory=dict)

    def ms_a_batch(self, title: str, tokens: float) -> float:
        """Return the median milliseconds for a batch of so many real tokens."""
        return statistics.median(self.turns[title]) * tokens * 1000

    @contextmanager
    def watching(self, contestant: Contestant, say: Callable[[str], None]) -> Iterator[None]:
        """Let a contestant that fails fall out. Wrong content is not its failure but the race's."""
        try:
            yield
        except DataError:
            raise
        except Exception as error:  # whatever somebody else's code raises: told in the report
            why = str(error).strip().splitlines() or [""]
            self.fallen[contestant.title] = f"{type(error).__name__}: {why[0]}"
            self.turns.pop(contestant.title, None)
            say(f"{contestant.title} fell out: {self.fallen[contestant.title]}")


def race(
    contestants: Sequence[Contestant],
    corpus: Corpus,
    plan: Plan,
    pace: Pace,
    say: Callable[[str], None],
) -> Standings:
    """Check what each contestant yields, then time all of them in turns.

    A contestant that fails is out, and `fallen` says why. Raises DataError when one yields
    something else than the corpus, which would make its time worthless.
    """
    standings = Standings()
    for contestant in contestants:
        with standings.watching(contestant, say):
            verify(contestant, corpus, segment(plan, 0, pace.segment), pace.warm)
    for round_ in range(pace.rounds):
        say(f"round {round_ + 1} of {pace.rounds}")
        batches = segment(plan, round_, pace.segment)
        # In another order each time, so that nobody always follows the same neighbour.
        for contestant in random.Random(round_).sample(contestants, len(contestants)):
            if contestant.title in standings.fallen:
                continue
            with standings.watching(contestant, say):
                spent = turn(contestant, corpus, batches, pace)
                standings.turns.setdefault(contestant.title, []).append(spent)
    return standings


def segment(plan: Plan, round_: int, size: int) -> Plan:
    """Return a round's batches, which follow the last round's; at its end the plan begins anew."""
    return [plan[(round_ * size + place) % len(plan)] for place in range(size)]


def verify(contestant: Contestant, corpus: Corpus, plan: Plan, count: int) -> None:
    """Check the first batches of a contestant, value by value, and that no row comes twice.

    Raises DataError when they are not the plan's, in the order that it promises.
    """
    if contestant.part is Part.FLOOR:
        return
    who = contestant.title
    with closing(contestant.start(plan)) as batches:
        seen = [check(batch, corpus, who=who) for batch in islice(batches, count)]
    if len(np.unique(np.concatenate(seen))) != sum(map(len, seen)):
        raise DataError(f"check what {who} yields", why="a row comes twice")
    if contestant.order is Order.ANY:
        ahead = {rows.tobytes() for rows in plan}
        right = all(rows.tobytes() in ahead for rows in seen)
    else:
        right = contestant.order is Order.OWN or all(map(np.array_equal, plan, seen))
    if not right:
        raise DataError(f"check what {who} yields", why="its batches are not those of the plan")


def turn(contestant: Contestant, corpus: Corpus, plan: Plan, pace: Pace) -> float:
    """Return the seconds that a contestant takes for one real token, its start left out."""
    numbers: list[Rows] = []
    floor = contestant.part is Part.FLOOR
    with closing(contestant.start(plan)) as batches:
        for _ in islice(batches, pace.warm):
            pass
        start = time.perf_counter()
        for place, batch in enumerate(islice(batches, pace.most)):
            numbers.append(plan[pace.warm + place] if floor else row_numbers(batch))
            if len(numbers) >= pace.least and time.perf_counter() - start > pace.seconds:
                break
        spent = time.perf_counter() - start
    return spent / int(corpus.lengths[np.concatenate(numbers)].sum())
