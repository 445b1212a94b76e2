"""Kills syncd at random, many times, and says what was lost, doubled or torn by it.

    python tests/soak/soak.py --kills 10000 --seed 1          (make soak KILLS=10000 SEED=1)
    python tests/soak/soak.py --kills 10000 --seed 1 --shard 2/8 --json 2.json
    python tests/soak/soak.py --add 1.json 2.json             the counts of shards, added up

A first episode, in which little is killed, records the points there are; the others then kill at
each of them about equally often, in pairs too, and from outside at any moment. What went wrong is
printed with seed and episode, which `--episode` repeats, and its folder is kept. The last line is
`kills N lost 0 doubled 0 torn 0`; the exit code is 1 when one of the three is not 0, or anything
else was wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import secrets
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).parent
SUPPORT = HERE.parent / "support"
sys.path[:0] = map(str, (HERE, SUPPORT, SUPPORT / "crash", HERE.parents[1]))

from episode import Episode, Outcome  # noqa: E402
from invariants import Harm  # noqa: E402
from plan import LoseVm, Plan, Shot, random_commands, random_plan  # noqa: E402

KILLS_AN_EPISODE = 30
RECORDING_COMMANDS = 16


@dataclass
class Tally:
    """The counts of a run, which add up."""

    kills: Counter[str] = field(default_factory=Counter)
    harm: Counter[str] = field(default_factory=Counter)
    points: set[str] = field(default_factory=set)
    episodes: int = 0
    looks: int = 0
    seeds: list[str] = field(default_factory=list)

    def add(self, outcome: Outcome) -> None:
        self.kills += outcome.kills
        self.harm += Counter(str(harm) for harm, _ in outcome.violations)
        self.points |= set(outcome.points)
        self.episodes += 1
        self.looks += outcome.looks

    def total(self) -> int:
        return sum(self.kills.values())

    def to_json(self) -> dict[str, object]:
        return {**vars(self), "points": sorted(self.points)}

    def merge(self, path: Path) -> None:
        """Add the counts that another run has written."""
        value = json.loads(path.read_bytes())
        self.kills += Counter(value["kills"])
        self.harm += Counter(value["harm"])
        self.points |= set(value["points"])
        self.episodes += value["episodes"]
        self.looks += value["looks"]
        self.seeds += value["seeds"]

    def table(self, *, points: bool) -> str:
        """Return the kills by step, or by each of its points, with what was counted beside."""
        kills: Counter[str] = Counter()
        for name in self.kills.keys() | self.points:
            kills[name if points else name.partition("@")[0]] += self.kills[name]
        width = max(map(len, kills), default=5)
        lines = [f"{'point' if points else 'step':<{width}}  kills"]
        lines += [f"{name:<{width}}  {count:>5}" for name, count in sorted(kills.items())]
        hit = sum(1 for name in self.points if self.kills[name])
        lines.append(
            f"{self.episodes} episodes, {self.looks} looks, {len(self.points)} points met,"
            f" {hit} of them killed at; seeds {', '.join(self.seeds)}"
        )
        if self.harm[Harm.OTHER]:
            lines.append(f"other {self.harm[Harm.OTHER]}")
        harm = " ".join(f"{h} {self.harm[h]}" for h in (Harm.LOST, Harm.DOUBLED, Harm.TORN))
        return "\n".join([*lines, f"kills {self.total()} {harm}"])


class Soak:
    """Runs episodes, some side by side, each in a process of its own."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._folder = Path(tempfile.mkdtemp(prefix="syncd-soak-"))
        self._running: dict[int, tuple[str, Plan, Path]] = {}
        self._missed = 0
        self.tally = Tally()

    def record(self) -> list[str]:
        """Find the points there are, with a few kills, so that those of a recovery are met too."""
        seed = f"{self._options.seed}/record"
        commands = random_commands(random.Random(seed), RECORDING_COMMANDS)
        anywhere = [Shot(f"{role}:*", 40) for role in ("controller", "worker")]
        lanes = [[*anywhere, LoseVm()]]
        self._begin(
            seed, Plan(lanes=lanes, commands=commands, commands_a_kill=9, all_commands=True)
        )
        self._finish_one()
        return sorted(self.tally.points)

    def run(self, points: Sequence[str], kills: int) -> None:
        """Run episodes until there were so many kills."""
        number = 0
        while self.tally.total() < kills or self._running:
            due = kills - self.tally.total() - KILLS_AN_EPISODE * len(self._running)
            if due > 0 and len(self._running) < self._options.jobs:
                seed = f"{self._options.seed}/{self._options.shard}/{number}"
                self._begin(seed, random_plan(seed, points, KILLS_AN_EPISODE))
                number += 1
            else:
                self._finish_one()
                self._show_progress(kills)

    def repeat(self, points: Sequence[str], number: int) -> None:
        """Run one episode again."""
        seed = f"{self._options.seed}/{self._options.shard}/{number}"
        self._begin(seed, random_plan(seed, points, KILLS_AN_EPISODE))
        self._finish_one()

    def _begin(self, seed: str, plan: Plan) -> None:
        folder = self._folder / seed.replace("/", "-")
        folder.mkdir()
        pid = os.fork()
        if pid == 0:
            try:
                outcome = Episode(plan, folder / "e", seed=seed, remote=self._options.remote).run()
                (folder / "outcome.json").write_text(json.dumps(outcome.to_json()))
            except BaseException:
                (folder / "failure").write_text(traceback.format_exc())
            finally:
                os._exit(0)
        self._running[pid] = (seed, plan, folder)

    def _finish_one(self) -> None:
        pid, _ = os.wait()
        seed, plan, folder = self._running.pop(pid)
        try:
            outcome = Outcome.from_json(json.loads((folder / "outcome.json").read_bytes()))
        except FileNotFoundError:
            failure = folder / "failure"
            told = failure.read_text() if failure.exists() else "it was killed"
            outcome = Outcome(violations=[(Harm.OTHER, f"the episode failed: {told}")])
        self.tally.add(outcome)
        self._missed += len(outcome.missed)
        if outcome.violations:
            print(f"\nepisode {seed}, kept in {folder}, plan {plan}")
            for harm, text in outcome.violations:
                print(f"  {harm}: {text}", flush=True)
        else:
            shutil.rmtree(folder)

    def _show_progress(self, kills: int) -> None:
        if sys.stdout.isatty():
            harm = " ".join(f"{harm} {self.tally.harm[harm]}" for harm in Harm)
            print(
                f"\r{self.tally.total()}/{kills} kills, {self.tally.episodes} episodes, {harm},"
                f" {self._missed} shots missed ",
                end="",
                flush=True,
            )

    def close(self) -> None:
        """Remove the folder, unless something in it is worth a look."""
        if not any(self._folder.iterdir()):
            self._folder.rmdir()


def _share(kills: int, shard: str) -> int:
    """Return how many of the kills are a shard's, written `I/N`, I from 1."""
    at, count = map(int, shard.split("/"))
    return kills * at // count - kills * (at - 1) // count


def _options(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=500)
    parser.add_argument("--seed", default="", help="any text; a random one by default")
    parser.add_argument("--shard", default="1/1", help="I/N: the I-th of N parts of the kills")
    parser.add_argument("--remote", choices=("local", "webdav"), default="local")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="side by side")
    parser.add_argument("--episode", type=int, help="repeat only this one")
    parser.add_argument("--points", action="store_true", help="list the kills by point, not step")
    parser.add_argument("--json", type=Path, help="write the counts to this file")
    parser.add_argument("--add", type=Path, nargs="+", help="only add up such files")
    options = parser.parse_args(argv)
    options.seed = options.seed or secrets.token_hex(4)
    return options


def main(argv: Sequence[str]) -> int:
    """Run, print the table, and return the exit code."""
    options = _options(argv)
    if options.add:
        tally = Tally()
        for path in options.add:
            tally.merge(path)
    else:
        print(f"seed {options.seed} shard {options.shard}", flush=True)
        began = time.monotonic()
        soak = Soak(options)
        points = soak.record()
        if options.episode is None:
            soak.run(points, _share(options.kills, options.shard))
        else:
            soak.repeat(points, options.episode)
        soak.close()
        tally = soak.tally
        tally.seeds = [f"{options.seed} {options.shard}"]
        print(f"\n{time.monotonic() - began:.0f} s; processor: {sum(os.times()[:4]):.0f} s")
    if options.json:
        options.json.write_text(json.dumps(tally.to_json(), indent=1))
    print(tally.table(points=options.points))
    return 1 if tally.harm.total() else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
