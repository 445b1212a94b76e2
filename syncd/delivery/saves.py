"""Whether a stage is in the middle of a save: of files that it writes one after the other.

Of a folder at rest nothing tells that another file is still to come. But where files were replaced
under their names together, and now some of them are and others not, the rest is waited for: a
checkpoint of this step and an optimiser of that one are of no use together.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from syncd.delivery.files import Found

# A file that was replaced so often, while others were not, is replaced without them.
OFTEN = 3

Version = tuple[int, int, int]


@dataclass
class _Saved:
    """The files of a run as they were last taken, by path, those that were replaced `together`
    then, and how often some were without the others since."""

    versions: Mapping[str, Version]
    together: frozenset[str] = frozenset()
    part: Mapping[str, Version] = field(default_factory=dict)
    count: int = 0


class Saves:
    """What was seen of runs' folders at rest. It is forgotten when the daemon ends."""

    def __init__(self) -> None:
        self._saved: dict[str, _Saved] = {}

    def is_half_done(self, run: str, files: Iterable[Found]) -> bool:
        """Whether more of a save is to come to a run's folder; otherwise note it as it is."""
        now = {f.path: (f.size, f.made_ns, f.inode) for f in files}
        saved = self._saved.setdefault(run, _Saved(now))
        replaced = {p: v for p, v in now.items() if saved.versions.get(p, v) != v}
        new = now.keys() - saved.versions.keys()
        if replaced and not new and replaced.keys() < saved.together & now.keys():
            saved.count += replaced != saved.part
            saved.part = replaced
            if saved.count < OFTEN:
                return True
        together = frozenset(replaced) or saved.together
        self._saved[run] = _Saved(now, together)
        return False
