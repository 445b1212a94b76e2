"""What of rclone's configuration a VM needs: the sections of its remotes, and of what they wrap."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from syncd.rclone.rcd import Rclone

CALL_SECONDS = 30.0
_NAMED = re.compile(r"(?P<name>[\w][\w.+@ -]*):")
Sections = Mapping[str, Mapping[str, str]]


@dataclass(frozen=True, kw_only=True)
class Excerpt:
    """The text of a configuration file, and what of it a person must see to at the VM."""

    text: str
    notes: tuple[str, ...]


def excerpt(rclone: Rclone, remotes: Iterable[str]) -> Excerpt:
    """Return what these remotes need, as rclone writes it; passwords are obscured there, no more.

    Raises RemoteError when rclone cannot be asked.
    """
    answer: dict[str, Any] = rclone.call("config/dump", {}, CALL_SECONDS)
    needed = needed_sections(answer, remotes)
    lines = [line for name in needed for line in _section(name, answer[name])]
    return Excerpt(text="".join(lines), notes=tuple(_notes({n: answer[n] for n in needed})))


def needed_sections(sections: Sections, remotes: Iterable[str]) -> list[str]:
    """Return the names of the sections that these remotes use, directly or through others."""
    needed: list[str] = []
    pending = list(remotes)
    while pending:
        text = pending.pop()
        for found in _NAMED.finditer(text):
            name = found["name"].strip()
            if name in sections and name not in needed:
                needed.append(name)
                pending += [str(value) for value in sections[name].values()]
    return needed


def _section(name: str, values: Mapping[str, str]) -> Iterator[str]:
    yield f"[{name}]\n"
    yield from (f"{key} = {value}\n" for key, value in values.items())
    yield "\n"


def _notes(sections: Sections) -> Iterator[str]:
    for name, values in sections.items():
        for key, value in values.items():
            if key.endswith("_file") and value:
                yield (
                    f"[{name}] of rclone's configuration names the file {value} of this machine "
                    f"({key}), which the VM does not have: put it there at the same path, or use "
                    "a setting that holds its content."
                )
