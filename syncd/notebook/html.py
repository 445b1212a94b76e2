"""The status as HTML, for the output of a notebook's cell: light or dark, wide or on a phone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from protocol.logs import one_line, stamp
from protocol.progress import Progress
from protocol.states import Result
from protocol.status import (
    EndedLine,
    RunningLine,
    Status,
    duration,
    gone_after,
    render_progress,
    render_risk,
    render_unsent,
    shown,
    size,
)

# The notebook's own colours, but for what must be seen.
_GOOD, _BAD, _BAR = "#2e9e5b", "#d64545", "#4a83d4"
_TABLE = "border-collapse:collapse;font-size:13px;text-align:left"
_CELL = "padding:2px 14px 2px 0;vertical-align:top;text-align:left;white-space:nowrap"
_LAST = "font-family:monospace;opacity:.75;white-space:pre-wrap;word-break:break-word"
_HEAD = "font-weight:600;margin:8px 0 2px"
_GOOD_RESULTS = frozenset({Result.SUCCESS})


def render_html(status: Status | None, notes: Sequence[str], *, now: float) -> str:
    """Return what a cell shows: the worker's status, and `notes` of who looks after it.

    `now` is in seconds since the epoch. None stands for a worker that has not told anything yet.
    """
    parts = [_note(text) for text in notes]
    parts += _status(status, now) if status else [_line("the worker is starting")]
    return f'<div style="font-family:sans-serif;font-size:14px">{"".join(parts)}</div>'


def _status(status: Status, now: float) -> Iterator[str]:
    age = max(now - status.time, 0.0)
    yield _line(f"worker {status.worker} on {status.host}, {stamp(now)}", "opacity:.75")
    if status.leaving:
        yield _note(f"the worker has left: {status.leaving}")
    elif age > gone_after(status):
        yield _note(f"the worker has said nothing for {duration(age)}")
    if not status.sealed:
        yield _note("not sealed: whoever can write to the remote can run code here")
    yield from (_note(problem) for problem in status.problems)
    yield _line("running", _HEAD)
    yield "".join(_running(run, now) for run in status.running) or _line("nothing")
    if status.waiting:
        yield _line("waiting", _HEAD)
        yield _table([(str(w.number), shown(w.line), w.why) for w in status.waiting])
    if status.ended:
        yield _line("ended", _HEAD)
        yield _table([_ended(each) for each in status.ended], first=1)
    yield _line(" · ".join(_facts(status)), "margin-top:8px;opacity:.75")


def _running(run: RunningLine, now: float) -> str:
    again = f", attempt {run.attempt}" if run.attempt > 1 else ""
    parts = [_line(f"{run.run_id}, for {duration(now - run.started)}{again}")]
    if run.progress:
        parts.append(_progress(run.progress))
    if risk := render_risk(run, now):
        parts.append(_line(risk))
    if run.last_line:
        parts.append(_line(one_line(run.last_line)[:160], _LAST))
    return "".join(parts)


def _progress(progress: Progress) -> str:
    text = render_progress(progress, bar=False)
    if progress.fraction is None:
        return _line(text)
    percent = f"{progress.fraction:.1%}"
    bar = (
        '<div style="display:inline-block;width:240px;max-width:60%;height:10px;'
        'border:1px solid currentColor;border-radius:3px;margin-right:8px">'
        f'<div style="width:{percent};height:100%;background:{_BAR}"></div></div>'
    )
    return f"<div>{bar}{escape(f'{progress.fraction:.0%}  {text}')}</div>"


def _ended(ended: EndedLine) -> tuple[str, str, str, str]:
    told = f"{ended.result}: {ended.cause}" if ended.cause else str(ended.result)
    mark = "✓" if ended.result in _GOOD_RESULTS else "✗"
    return mark, shown(ended.line), stamp(ended.ended), told


def _facts(status: Status) -> Iterator[str]:
    yield f"disk free {size(status.disk_free)}"
    yield from (f"{name} {value}" for name, value in status.machine.items())
    if waits := render_unsent(status):
        yield waits


def _table(rows: Sequence[Sequence[str]], *, first: int = 0) -> str:
    """Return a table; with `first`, the first column's marks are coloured."""
    text = ""
    for row in rows:
        colour = f";color:{_GOOD if row[0] == '✓' else _BAD}" if first else ""
        styles = [_CELL + colour, *[_CELL] * (len(row) - 1)]
        cells = zip(styles, row, strict=True)
        text += f"<tr>{''.join(f'<td style={style!r}>{escape(t)}</td>' for style, t in cells)}</tr>"
    return f'<table style="{_TABLE}">{text}</table>'


def _note(text: str) -> str:
    return _line(text, f"color:{_BAD};font-weight:600")


def _line(text: str, style: str = "") -> str:
    return f'<div style="{style}">{escape(one_line(text))}</div>'
