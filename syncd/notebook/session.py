"""A Colab session that is made and ended from here, with Google's client.

`bring_up` makes one, gives it the key and the cell, and all else goes through the folder;
`take_down` ends it. Which one it is stands in `.syncd/colab.json`, from before it is made: whatever
ends us, the next call finds what is paid for.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from protocol.errors import DataError, RemoteError, RunFailedError
from protocol.paths import Layout
from protocol.publish import publish_bytes, publish_json
from protocol.schema import decode, loads
from protocol.states import State
from protocol.status import Status, duration, gone_after, size
from syncd.config import Key
from syncd.notebook.colab import BUSY, Attached, Colab, Gpu, failure
from syncd.unsent import Unsent
from syncd.view import CommandView, read_age, read_commands, read_status, read_unsent

LOOK_SECONDS = 0.5
# Until the cell, once it was given, prints its first line.
HAND_OVER_SECONDS = 60.0
# How long after the last run's end what it has made is known to be sent, by the worker's status.
SETTLED_SECONDS = 15.0
# Not a hidden file, which no Jupyter server takes.
KEY_THERE = "/content/syncd-key"
# The key goes as a file and not as code, which the client keeps in its history; it then stands in
# the kernel's environment, where the cell looks first.
TAKE_KEY = f"""\
import os
with open({KEY_THERE!r}) as file:
    os.environ["SYNCD_KEY"] = file.read().strip()
os.unlink({KEY_THERE!r})
print("the key is taken")
"""
TAKEN = "the key is taken"
RUNS = "the cell runs"


@dataclass(frozen=True, kw_only=True)
class Session:
    """A session that was begun from here, at `started`; `handed`: whether it was given the cell."""

    name: str
    gpu: Gpu
    started: float
    handed: bool = False


def session_file(layout: Layout) -> Path:
    """Where it is kept which session is ours."""
    return layout.private / "colab.json"


def read_session(layout: Layout) -> Session | None:
    """Return the session that was begun from here, None for none. Raises DataError."""
    path = session_file(layout)
    try:
        return decode(Session, loads(path.read_bytes()))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise DataError(
            "read which session is ours",
            path=path,
            why=str(error),
            hint="Remove it; `colab sessions` lists those that are paid for.",
        ) from error


def _keep(layout: Layout, session: Session) -> Session:
    publish_json(session_file(layout), asdict(session), mode=0o600)
    return session


# Up


@dataclass(frozen=True)
class Brought:
    """A session that is up; `attached` is None where it had the cell before."""

    session: Session
    attached: Attached | None = None

    def leave(self) -> None:
        """Leave the cell to itself."""
        if self.attached:
            self.attached.leave()


def bring_up(
    layout: Layout,
    client: Colab,
    *,
    gpu: Gpu,
    key: Key | None,
    make_cell: Callable[[], str],
    tell: Callable[[str], None],
) -> Brought:
    """Have a session run the cell: the one that was begun before, or else a new one.

    Raises UserError; what was made is then still there, and is found by the next call.
    """
    client.check()
    there, session = client.sessions(), read_session(layout)
    if session and session.handed and session.name in there:
        tell(f"session {session.name} is there, with {_shown(session.gpu)}")
        return Brought(session)
    cell = make_cell()  # before anything is paid for
    if session and session.name not in there:
        if session.handed:
            tell(f"session {session.name} has ended: another one is made")
        session = None
    if session is None:
        name = f"syncd-{secrets.token_hex(3)}"
        session = _keep(layout, Session(name=name, gpu=gpu, started=time.time()))
        client.create(name, gpu)
        tell(f"session {name} is made, with {_shown(gpu)}")
    if key is not None:
        _give_key(layout, client, session.name, key)
    attached = _hand_over(layout, client, session.name, cell)
    tell("it was given the key and the cell" if key else "it was given the cell")
    return Brought(_keep(layout, replace(session, handed=True)), attached)


def _shown(gpu: Gpu) -> str:
    return "no GPU" if gpu is Gpu.NONE else f"a {gpu}"


def _give_key(layout: Layout, client: Colab, name: str, key: Key) -> None:
    path = layout.private / "colab-key"
    publish_bytes(path, key.text().encode("ascii"), mode=0o600)
    try:
        client.upload(name, path, KEY_THERE)
    finally:
        path.unlink()
    said = client.execute(name, TAKE_KEY)
    if TAKEN not in said:
        raise failure("give the key to the session", said, 0)


def _hand_over(layout: Layout, client: Colab, name: str, cell: str) -> Attached:
    """Have the cell run. Returns once it does; raises UserError otherwise."""
    path = layout.private / "colab-cell.py"
    publish_bytes(path, f"print({RUNS!r}, flush=True)\n{cell}".encode(), mode=0o600)
    deadline = time.monotonic() + HAND_OVER_SECONDS
    attached = client.attach(name, path, layout.private / "colab.log")
    try:
        while RUNS not in attached.lines():
            code = attached.code()
            if code is not None:
                raise failure("run the cell in the session", "\n".join(attached.lines()), code)
            if time.monotonic() > deadline:
                why = f"the session's kernel does not answer for {duration(HAND_OVER_SECONDS)}"
                raise RemoteError("run the cell in the session", why=why, hint=BUSY)
            time.sleep(LOOK_SECONDS)
    except BaseException:
        attached.leave()
        raise
    return attached


def wait_for_worker(
    layout: Layout, brought: Brought, *, before: Status | None, seconds: float
) -> Iterator[str]:
    """Yield how it goes until a worker is heard of; one that was not there `before`, if the session
    is new. The client is not attached any more then.

    Raises RunFailedError when the cell has ended, RemoteError when none is heard of in so many
    seconds.
    """
    deadline = time.monotonic() + seconds
    attached = brought.attached
    try:
        while not _is_there(layout, before if attached else None):
            if attached and attached.code() == 0:
                raise _ended(attached)
            if time.monotonic() > deadline:
                raise RemoteError(
                    f"wait for the worker of {brought.session.name}",
                    path=layout.status,
                    why=f"none was heard of in {duration(seconds)}",
                    hint="The session is there and is paid for: .syncd/colab.log has what the cell "
                    "printed at first; `syncd up` waits on, `syncd down --now` ends it.",
                )
            lines = attached.lines() if attached else []
            yield lines[-1] if lines else "nothing was heard of the worker yet"
            time.sleep(LOOK_SECONDS)
    finally:
        brought.leave()


def _is_there(layout: Layout, before: Status | None) -> bool:
    """Whether a worker is heard of, other than the one of before."""
    status, age = read_status(layout), read_age(layout)
    if status is None or status.leaving or (before and status.worker == before.worker):
        return False
    return age is not None and age <= gone_after(status)


def _ended(attached: Attached) -> RunFailedError:
    return RunFailedError(
        "run the cell in the session",
        path=attached.output,
        why=f"it ended: {' / '.join(attached.lines()[-3:])[-500:] or 'and said nothing'}",
        hint="The session is there and is paid for: `syncd down --now` ends it.",
    )


# Down


def what_holds(
    commands: Sequence[CommandView], status: Status | None, unsent: Unsent | None
) -> str:
    """Return why a session is still needed, as far as the folder tells; "" when it is not.

    A worker that was never heard of, or has left, holds nothing.
    """
    if status is None or status.leaving:
        return ""
    waiting = [view.run_id or view.line for view in commands if view.state is not State.ENDED]
    if waiting:
        more = f" and {len(waiting) - 1} more" if len(waiting) > 1 else ""
        return f"{waiting[0]}{more} has not ended"
    if unsent and unsent.commands:
        return "commands wait here to be sent"
    ended = max((view.time or 0.0 for view in commands), default=0.0)
    if status.unsent_bytes:
        return f"the worker has {size(status.unsent_bytes)} to send"
    if status.time < ended + SETTLED_SECONDS:
        return "what the last run made may still be on its way"
    return ""


def wait_until_free(layout: Layout) -> Iterator[str]:
    """Yield why the session is still needed, now and then, until it is not.

    Raises RemoteError when the worker is not heard of any more.
    """
    while True:
        status, age = read_status(layout), read_age(layout)
        why = what_holds(read_commands(layout), status, read_unsent(layout))
        if not why:
            return
        if status and age is not None and age > gone_after(status):
            raise RemoteError(
                "wait until the session is not needed",
                path=layout.status,
                why=f"{why}, and the worker was not heard of for {duration(age)}",
                hint="What it holds may not be here. `syncd down --now` ends the session all the "
                "same; `syncd up` makes another one, which goes on.",
            )
        yield why
        time.sleep(LOOK_SECONDS)


def take_down(layout: Layout, client: Colab, session: Session) -> None:
    """End the session, and forget it. Raises UserError: it is then still ours."""
    client.stop(session.name)
    session_file(layout).unlink(missing_ok=True)
