"""Names that both ends, and the trainer, must spell alike: stages, runs, paths.

A stage is looked up by its canonical name everywhere (log file, `results.json`, `after`, the
gate), so there is one function that makes it and nothing else compares stage names.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches

from protocol.errors import ConfigError, RefusedError

MAX_STAGE_LENGTH = 64
SHELL_STAGE = "sh"
_STAGE = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*\Z")
_SHELL_LOG = re.compile(r"sh-([0-9]+)\Z")
# Names that Windows keeps for devices, with any extension; a laptop may run it.
_DEVICES = frozenset(
    {"con", "prn", "aux", "nul", "conin$", "conout$"}
    | {f"{port}{n}" for port in ("com", "lpt") for n in "0123456789¹²³"}
)
_RUN_ID = re.compile(
    r"(?P<stage>[a-z0-9]+(?:-[a-z0-9]+)*)\.(?P<number>[0-9]{1,12})\.(?P<origin>[0-9a-f]{4,16})"
    r"(?:\.(?P<arm>[a-z0-9]+(?:-[a-z0-9]+)*))?\Z"
)
MAX_RUN_ID_LENGTH = 200
MAX_COMPONENT_BYTES = 255
MAX_PATH_BYTES = 1024


def canonical_stage(name: str) -> str:
    """Return the canonical form of a stage name: lower case, words joined by `-`.

    `Fine Tune`, `fine_tune` and `fine-tune` are one stage, `fine-tune`.

    Raises ConfigError when nothing legal can be made of it: other characters than letters,
    digits, blanks, `_` and `-`, more than 64 characters, a name that Windows keeps for a device,
    or `sh-<number>`, which names the logs of `sh:` commands.
    """
    folded = unicodedata.normalize("NFKC", name).strip().lower()
    canonical = re.sub(r"[\s_-]+", "-", folded)
    if not _STAGE.match(canonical):
        why = "a stage name is made of the letters a-z, digits, and single - _ or blanks between"
    elif len(canonical) > MAX_STAGE_LENGTH:
        why = f"longer than {MAX_STAGE_LENGTH} characters"
    elif canonical in _DEVICES:
        why = "kept by Windows for a device"
    elif _SHELL_LOG.match(canonical):
        why = "sh-<number> names the logs of sh: commands"
    else:
        return canonical
    raise ConfigError(f"stage name {name[:80]!r}", why=why, hint="Choose another name.")


def shell_number(log: str) -> int | None:
    """Return the number of the `sh:` command whose log has this name, None for other files."""
    match = _SHELL_LOG.match(log.removesuffix(".log")) if log.endswith(".log") else None
    return int(match[1]) if match else None


def canonical_stages(names: Iterable[str]) -> dict[str, str]:
    """Map each canonical stage name to the spelling that defined it, in order.

    Raises ConfigError when two names would be one stage, and for `sh`, which names the runs of
    `sh:` commands.
    """
    seen: dict[str, str] = {}
    for name in names:
        canonical = canonical_stage(name)
        if canonical == SHELL_STAGE:
            raise ConfigError(
                f"stage {name!r}", why="the name of sh: commands", hint="Choose another name."
            )
        if canonical in seen:
            raise ConfigError(
                f"stage {name!r}",
                why=f"the same stage as {seen[canonical]!r}: both are {canonical!r}",
                hint="Rename one of them.",
            )
        seen[canonical] = name
    return seen


def suggest(name: str, known: Iterable[str]) -> str:
    """Return a hint for an unknown stage: the nearest known name, or the list of them."""
    names = sorted(known)
    near = get_close_matches(name, names, n=1)
    if near:
        return f"Did you mean {near[0]!r}?"
    return f"Known stages: {', '.join(names)}." if names else "No stage is defined yet."


@dataclass(frozen=True, kw_only=True)
class RunId:
    """The parts of a run id, written `<stage>.<command number>.<controller nonce>[.<arm>]`.

    `number` is the command's number in the queue, `origin` the nonce of the controller that gave
    it (`0000` for a trainer that runs by itself), `arm` the variant within the run, or "".
    """

    stage: str
    number: int
    origin: str
    arm: str = ""

    def __str__(self) -> str:
        text = f"{self.stage}.{self.number:04d}.{self.origin}"
        return f"{text}.{self.arm}" if self.arm else text

    @classmethod
    def parse(cls, text: str) -> RunId:
        """Parse a run id. Raises RefusedError when it is none."""
        match = _RUN_ID.match(text) if len(text) <= MAX_RUN_ID_LENGTH else None
        if not match:
            raise RefusedError(
                f"run id {text[:80]!r}", why="not of the form stage.number.nonce[.arm]"
            )
        return cls(
            stage=match["stage"],
            number=int(match["number"]),
            origin=match["origin"],
            arm=match["arm"] or "",
        )


def safe_relative(path: str) -> str:
    """Return `path` if another machine may name a file so inside our tree.

    A safe path is relative, `/`-separated, has no empty, `.` or `..` component, no control
    character, backslash, colon or character that Windows refuses, no component that ends in a
    blank or a dot or is a device name, and keeps to 255 bytes a component and 1024 in all.

    Raises RefusedError with the reason otherwise.
    """
    why = _unsafe_reason(path)
    if why:
        raise RefusedError(f"path {path[:120]!r}", why=why)
    return path


def _unsafe_reason(path: str) -> str:
    try:
        encoded = path.encode("utf-8")
    except UnicodeEncodeError:
        return "not valid UTF-8"
    if not path:
        return "empty"
    if len(encoded) > MAX_PATH_BYTES:
        return f"longer than {MAX_PATH_BYTES} bytes"
    for part in path.split("/"):
        if part in ("", ".", ".."):
            return "absolute, or has an empty, '.' or '..' component"
        if any(unicodedata.category(c) == "Cc" or c in '\\:*?"<>|' for c in part):
            return 'holds a control character or one of \\ : * ? " < > |'
        if part[-1] in " .":
            return "a component ends in a blank or a dot"
        if part.split(".")[0].rstrip().lower() in _DEVICES:
            return "names a device"
        if len(part.encode("utf-8")) > MAX_COMPONENT_BYTES:
            return f"a component is longer than {MAX_COMPONENT_BYTES} bytes"
    return ""
