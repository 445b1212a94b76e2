"""`syncd bridge`, and `syncd watch --bridge`."""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from syncd.cli import BRIDGE_ADDRESS, Flag, Folder, Json

if TYPE_CHECKING:
    from protocol.paths import Layout
    from syncd.bridge.bridge import Bridge
    from syncd.config import Settings

log = logging.getLogger("syncd")


def bridge(
    *,
    address: str = BRIDGE_ADDRESS,
    tunnel: str = "",
    url: str = "",
    folder: Folder = None,
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
    start_logging(verbose=False)
    with (
        _until_signal() as ended,
        running(
            layout, settings, address=address, tunnel=tunnel, url=url, show_key=show_key, json=json
        ) as bridge,
    ):
        while not ended.wait(1.0):
            bridge.check()


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
    key = load_key(layout)
    seen: list[str] = []

    def tell(url: str) -> None:
        remote = told.worker_remote(url, served.password)
        if json:
            _print(told.json_line(url, served.password_file))
        elif seen:
            found = "A worker with the other remote finds it by itself.\n"
            text = found if settings.fallback else told.changed_text(remote)
            _print(f"bridge: {url}\n\n{text}")
        else:
            _print(f"bridge: {url}\n\n{served.advice()}")
            text = told.first_text(
                remote, key, show_key=show_key, key_path=layout.key, fallback=settings.fallback
            )
            _print(text)
        seen.append(url)

    objects = served_objects(layout, settings)
    served = Bridge(layout, objects, address=at, tunnel=tunnel, url=url, told=tell)
    if not at.is_private():
        log.warning("%s is open to the network, and what it sends is not encrypted", at.url)
    with served:
        log.info("the bridge listens at %s", at.url)
        yield served


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
