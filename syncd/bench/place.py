"""What each row of the benchmark is given: where to work, how much to measure, whom to tell."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from protocol.wire import Role
from syncd.bench.samples import Scale
from syncd.bench.world import Route, World, world

WORLD = "world"  # the folder, below a row's own, of what `Place.world` builds


@dataclass(frozen=True, kw_only=True)
class Place:
    """`folder` is for one row alone, and empty; `own` is the user's remote where it runs on one."""

    folder: Path
    scale: Scale
    say: Callable[[str], None]
    own: str = ""
    rclone_config: str = ""

    @property
    def config(self) -> Path | None:
        """The rclone configuration that knows the user's remote; None for rclone's own."""
        return Path(self.rclone_config) if self.rclone_config else None

    @contextlib.contextmanager
    def world(
        self,
        route: Route,
        stages: Mapping[str, Sequence[str]],
        environ: Mapping[Role, Mapping[str, str]] | None = None,
    ) -> Iterator[World]:
        """Start both ends, as the row needs them."""
        with world(
            self.folder / WORLD,
            route,
            stages,
            environ=environ,
            own=self.own,
            rclone_config=self.rclone_config,
        ) as built:
            yield built

    def tell(self, done: int, of: int) -> None:
        """Say now and then how far a row is."""
        if done % 10 == 0 and done:
            self.say(f"{done} of {of}")
