"""`syncd bridge`, and `syncd watch --bridge`."""

from __future__ import annotations

import contextlib
import logging
import signal
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from protocol.errors import DataError, RemoteError, UsageError
from syncd.bridge import password_file, read_password
from syncd.cli import BRIDGE_ADDRESS, Flag, Folder, Json

if TYPE_CHECKING:
    from protocol.paths import Layout
    from syncd.bridge.bridge import Bridge
    from syncd.config import Key, Settings

log = logging.getLogger("syncd")


def bridge(
    *,
    address: str = BRIDGE_ADDRESS,
    tunnel: str = "",
    url: str = "",
    folder: Folder = None,
    show: Flag = False,
    show_key: Flag = False,
    json: Json = False,
) -> None:
    """The command; what it does is said where it is registered, in `syncd.cli`.

    Parameters
    ----------
    address
        Where to listen.
    tunnel
        What leads there from elsewhere: cloudflared, cloudflared:NAME,
        ssh:user@host[:port], or command:PROGRAM, which prints a URL.
    url
        Where a worker reaches the bridge, when the tunnel cannot tell.
    folder
        The shared folder's end here.
    show
        Print what to paste at a worker of the bridge that runs,
        with its password and the URL of now. The exit code is 5 when none runs, or
        it has no URL yet.
    show_key
        Print the key too, so that what is to be pasted is whole.
    json
        Print a line of JSON when it is ready, and whenever the URL is another one.
    """
    from syncd.cli import start_logging
    from syncd.config import load_settings
    from syncd.view import find_folder

    layout = find_folder(folder or Path())
    settings = load_settings(layout, {})
    if show:
        if tunnel or url:
            raise UsageError(_SHOW, why="--show goes with --show-key, --json and --folder alone")
        _show(layout, settings, show_key=show_key, json=json)
        return
    start_logging(verbose=False)
    with (
        _until_signal() as ended,
        running(
            layout, settings, address=address, tunnel=tunnel, url=url, show_key=show_key, json=json
        ) as bridge,
    ):
        while not ended.wait(1.0):
            bridge.check()


_SHOW = "syncd bridge --show"


def _show(layout: Layout, settings: Settings, *, show_key: bool, json: bool) -> None:
    """Print what to paste at a worker of the bridge that runs. Raises RemoteError for none."""
    from syncd.bridge import current_url, told
    from syncd.bridge.running import is_running, read_record
    from syncd.config import load_key

    record, why, hint = read_record(layout), "", ""
    if record is None or is_running(layout) is False:
        why, hint = "no bridge runs for this folder", _START
    elif current_url(layout) is None:
        why = f"its tunnel, {record.tunnel_kind}, has told no URL yet"
        hint = "Try again soon; .syncd/bridge/tunnel.log says what the tunnel does."
    if record is None or why:
        raise RemoteError(_SHOW, path=layout.root, why=why, hint=hint)
    if json:
        _print(told.json_line(record.url, password_file(layout)))
    else:
        teller = _Teller(layout, settings, load_key(layout), show_key, to_person=True)
        _print(teller.first(record.url, record.advice))


_START = "Start one: `syncd watch --bridge`, or `syncd bridge`, with the --tunnel that you use."


@dataclass(frozen=True)
class _Teller:
    """Says what a person is told of a bridge, at first and when its URL is another one.

    The password is in it only with `to_person`: what goes into a file may be kept there for ever.
    """

    layout: Layout
    settings: Settings
    key: Key | None
    show_key: bool
    to_person: bool

    def first(self, url: str, advice: str) -> str:
        from syncd.bridge import told

        text = told.brief_text()
        if self.to_person:
            text = told.first_text(
                self._remote(url),
                self.key,
                show_key=self.show_key,
                key_path=self.layout.key,
                fallback=self.settings.fallback,
            )
        return "\n\n".join(part for part in (f"bridge: {url}", advice, text) if part)

    def changed(self, url: str) -> str:
        from syncd.bridge import told

        text = told.brief_changed_text()
        if self.settings.fallback:
            text = "A worker with the other remote finds it by itself.\n"
        elif self.to_person:
            text = told.changed_text(self._remote(url), sealed=self.key is not None)
        return f"bridge: {url}\n\n{text}"

    def _remote(self, url: str) -> str:
        from syncd.bridge.told import worker_remote

        return worker_remote(url, read_password(self.layout) or "")


@contextlib.contextmanager
def running(
    layout: Layout,
    settings: Settings,
    *,
    address: str = BRIDGE_ADDRESS,
    tunnel: str = "",
    url: str = "",
    show_key: bool = False,
    json: bool = False,
) -> Iterator[Bridge]:
    """Run a bridge while the block does, and print what the person has to know.

    Raises what `Bridge` does, and ConfigError where the remote is none that a bridge serves.
    """
    from syncd.bridge import told
    from syncd.bridge.bridge import Bridge, served_objects
    from syncd.bridge.server import Address
    from syncd.config import load_key

    at = Address.parse(address)
    teller = _Teller(layout, settings, load_key(layout), show_key, to_person=sys.stdout.isatty())
    seen: list[str] = []

    def tell(url: str) -> None:
        if json:
            _print(told.json_line(url, served.password_file))
        elif seen:
            _print(teller.changed(url))
        else:
            _print(teller.first(url, served.advice()))
        seen.append(url)

    objects = served_objects(layout, settings)
    served = Bridge(layout, objects, address=at, tunnel=tunnel, url=url, told=tell)
    if not at.is_private():
        log.warning("%s is open to the network, and what it sends is not encrypted", at.url)
    _refresh(layout, teller.key)
    with served:
        log.info("the bridge listens at %s", at.url)
        yield served


def _refresh(layout: Layout, key: Key | None) -> None:
    """Have the next cell get what runs here; without it, it gets what the last one got."""
    from syncd.bridge import bootstrap_folder
    from syncd.notebook.payload import refresh
    from syncd.notebook.sealed import secret_of

    try:
        refresh(bootstrap_folder(layout), secret_of(key))
    except (OSError, DataError) as error:
        log.warning("what a notebook's cell fetches is not brought up to date: %s", error)


def _print(text: str) -> None:
    # Whoever read it may have gone; the bridge goes on.
    with contextlib.suppress(BrokenPipeError):
        print(text.strip("\n"), end="\n\n" if "\n" in text else "\n", flush=True)


@contextlib.contextmanager
def _until_signal() -> Iterator[threading.Event]:
    """Yield an event that SIGTERM and SIGINT set."""
    ended = threading.Event()

    def end(signum: int, frame: FrameType | None) -> None:
        ended.set()

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield ended
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
