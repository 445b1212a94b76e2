"""The grammar of `queue.txt`, and which of its lines are new commands.

    run:<stage>            start a stage
    sh:<base64>            run a UTF-8 shell script once
    stop:<stage>           stop the stage's runs that stand before this line

One command a line; blank lines and lines that start with `#` say nothing. Lines end as on any
system (LF, CR LF, CR); blanks around a line and a byte-order mark are passed over.
"""

from __future__ import annotations

import base64
import binascii
import codecs
import contextlib
import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from protocol.errors import ConfigError, UserError
from protocol.logs import one_line
from protocol.names import canonical_stage

MAX_LINE_BYTES = 1024 * 1024
MAX_QUEUE_BYTES = 64 * 1024 * 1024
SETTLE_SECONDS = 5.0
_WHAT = "queue line"
_ENDINGS = re.compile(r"\r\n|\r|\n")


@dataclass(frozen=True)
class RunCommand:
    """`run:<stage>`, the stage's name in canonical form."""

    stage: str


@dataclass(frozen=True)
class ShellCommand:
    """`sh:<base64>`, decoded."""

    script: str


@dataclass(frozen=True)
class StopCommand:
    """`stop:<stage>`, the stage's name in canonical form."""

    stage: str


Command = RunCommand | ShellCommand | StopCommand


@dataclass(frozen=True, kw_only=True)
class QueueLine:
    """A line that says something: `command`, or `error`, the reason why it is none.

    `number` counts from 1 as an editor does. `finished` is false for a last line without an end.
    """

    number: int
    text: str
    command: Command | None
    error: str = ""
    finished: bool = True


def parse_command(text: str) -> Command:
    """Parse one line that is neither blank nor a comment. Raises ConfigError with the reason."""
    verb, colon, rest = text.strip().partition(":")
    if not colon or verb not in ("run", "sh", "stop"):
        raise ConfigError(
            _WHAT, why="not run:<stage>, sh:<base64> or stop:<stage>", hint=_hint(verb)
        )
    if verb == "sh":
        return ShellCommand(_decode_script(rest.strip()))
    stage = canonical_stage(rest)
    return RunCommand(stage) if verb == "run" else StopCommand(stage)


def _hint(verb: str) -> str:
    folded = verb.strip().lower()
    return f"Write {folded}: in lower case." if folded in ("run", "sh", "stop") else ""


def _decode_script(text: str) -> str:
    what = f"{_WHAT} sh"
    if not text:
        raise ConfigError(what, why="no script follows", hint="Use `syncd sh 'COMMAND'`.")
    try:
        script = base64.b64decode(text, validate=True).decode("utf-8")
    except (binascii.Error, ValueError) as error:
        bad = isinstance(error, UnicodeDecodeError)
        why = "the script is not UTF-8" if bad else f"broken base64 ({error})"
        raise ConfigError(what, why=why, hint="Use `syncd sh 'COMMAND'`.") from error
    if not script.strip():
        raise ConfigError(what, why="the script is blank")
    if "\0" in script:
        raise ConfigError(what, why="the script holds a NUL character")
    return script


def encode_script(script: str) -> str:
    """Return the queue line that runs a shell script."""
    return "sh:" + base64.b64encode(script.encode("utf-8")).decode("ascii")


def readable(line: str) -> str:
    """Return a line as a person reads it: `sh: nvidia-smi ...` for a script of several lines.

    Control characters are escaped; a line that is no command comes back as it is, but for those.
    """
    text = line
    with contextlib.suppress(ConfigError):
        command = parse_command(line)
        if isinstance(command, ShellCommand):
            lines = [each.strip() for each in command.script[:4096].splitlines() if each.strip()]
            more = " ..." if len(lines) > 1 else ""
            text = f"sh: {lines[0]}{more}" if lines else line
    return one_line(text)


def parse_queue(data: bytes) -> list[QueueLine]:
    """Parse the whole file. Never raises: a line that is no command carries its error."""
    lines: list[QueueLine] = []
    texts = _ENDINGS.split(_decode(data))
    for number, raw in enumerate(texts, start=1):
        text = raw.strip().strip("\ufeff\0").strip()
        if not text or text.startswith("#"):
            continue
        encoded = text.encode("utf-8", "surrogateescape")
        finished = number < len(texts)
        command, error = None, ""
        try:
            if len(encoded) > MAX_LINE_BYTES:
                raise ConfigError(_WHAT, why=f"longer than {MAX_LINE_BYTES} bytes")
            if "\udc80" <= max(text) <= "\udcff":
                raise ConfigError(_WHAT, why="not UTF-8")
            command = parse_command(text)
        except UserError as problem:
            # "line 3: not run:<stage>, ...", and not "line 3: queue line: not run:<stage>, ..."
            error = f"line {number}: {str(problem).removeprefix(_WHAT).lstrip(': ')}"
        shown = encoded.decode("utf-8", "backslashreplace")
        lines.append(
            QueueLine(number=number, text=shown, command=command, error=error, finished=finished)
        )
    return lines


def _decode(data: bytes) -> str:
    # Editors of Windows save "Unicode" as UTF-16 with a byte-order mark.
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return data.decode("utf-16", "replace")
    return data.removeprefix(codecs.BOM_UTF8).decode("utf-8", "surrogateescape")


@dataclass(frozen=True, kw_only=True)
class ScanDecision:
    """What a scan of the queue found.

    `new` are the lines that are new commands, in file order; `counts` is what to keep, durably,
    as the last scan; `settling` says that the file must stay as it is until SETTLE_SECONDS have
    passed before the rest counts.
    """

    new: tuple[QueueLine, ...]
    counts: Mapping[str, int]
    settling: bool


def scan(
    last: Mapping[str, int], lines: Sequence[QueueLine], *, unchanged_for: float
) -> ScanDecision:
    """Decide which lines are new commands.

    `last` holds, for each line's identity, how often it stood in the file at the last scan;
    `unchanged_for` is for how many seconds the file has been as it is. A line is new when it
    stands there more often than before, the last of its equals being the new ones. Growth counts
    at once; a file that lost lines, and a last line without an end, count once they have settled.
    """
    settled = unchanged_for >= SETTLE_SECONDS
    whole = [line for line in lines if line.finished or settled]
    counts = Counter(identity(line.text) for line in whole)
    # An unfinished line that the last scan counted is still there: nothing was lost.
    present = counts + Counter(identity(line.text) for line in lines if not line.finished)
    lost = any(present[key] < count for key, count in last.items())
    if lost and not settled:
        return ScanDecision(new=(), counts=last, settling=True)
    known, new = Counter(last), []
    for line in whole:
        key = identity(line.text)
        if known[key] > 0:
            known[key] -= 1
        else:
            new.append(line)
    kept = counts if settled else {k: max(counts[k], last.get(k, 0)) for k in {*counts, *last}}
    return ScanDecision(
        new=tuple(new),
        counts=dict(kept),
        settling=any(not line.finished for line in lines) and not settled,
    )


def identity(text: str) -> str:
    """Return what makes two lines equal: the text, or its hash when it is long."""
    if len(text) <= 80:
        return text
    return "sha256:" + hashlib.sha256(text.encode("utf-8")).hexdigest()


def lines_of(commands: Iterable[str]) -> str:
    """Return text to append to a queue: one command a line, each ended."""
    return "".join(f"{command}\n" for command in commands)
