"""The end that is looked at: its folder, its settings and its key, as far as they can be read."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from protocol.errors import ConfigError, DataError, UserError
from protocol.paths import Layout
from protocol.wire import Role
from syncd.config import Key, Settings, load_key, load_settings
from syncd.view import find_folder, read_role

T = TypeVar("T")

LOOK_SECONDS = 20.0


@dataclass(frozen=True, kw_only=True)
class Patient:
    """What could be read of an end; `errors` says, by "folder", "settings" and "key", why not."""

    layout: Layout | None = None
    settings: Settings | None = None
    key: Key | None = None
    errors: dict[str, UserError] = field(default_factory=dict)

    @property
    def role(self) -> Role | None:
        return self.settings.role if self.settings else None


def look_at(start: Path, *, role: Role | None = None, seconds: float = LOOK_SECONDS) -> Patient:
    """Read what there is of the end in the folder `start`, or above it. Never raises UserError.

    `role` is a person's word for which end it is; else the settings say so, or the daemon's state.
    In a thread: where a mount hangs, that is what is told after some seconds.
    """
    found: Future[Patient] = Future()

    def read() -> None:
        try:
            found.set_result(_read(start, role))
        except BaseException as error:
            found.set_exception(error)

    threading.Thread(target=read, name="look", daemon=True).start()
    with suppress(TimeoutError):
        return found.result(seconds)
    hint = "Its disk or mount hangs: look there."
    why = f"no answer after {seconds:.0f} s"
    return Patient(errors={"folder": DataError("look at", path=start, why=why, hint=hint)})


def _read(start: Path, role: Role | None) -> Patient:
    errors: dict[str, UserError] = {}

    def attempt(name: str, read: Callable[[], T]) -> T | None:
        try:
            return read()
        except UserError as error:
            errors[name] = error
        except OSError as error:
            why = error.strerror or str(error)
            errors[name] = ConfigError(f"read the {name}", path=error.filename, why=why)
        return None

    layout = attempt("folder", lambda: find_folder(start))
    if layout is None:
        return Patient(errors=errors)
    known = None
    with suppress(UserError, OSError):  # a damaged state is told by a check
        known = read_role(layout)
    flags = {"role": role}
    return Patient(
        layout=layout,
        settings=attempt("settings", lambda: load_settings(layout, flags, role=known)),
        key=attempt("key", lambda: load_key(layout)),
        errors=errors,
    )
