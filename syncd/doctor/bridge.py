"""Checks of a controller's bridge: its server, its tunnel, and whether the worker knows the URL.

The tunnel's URL is tried from this machine. An answer proves that it leads here; none proves
little, since a laptop may be unable to reach its own URL.
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import os
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.client import HTTPMessage
from typing import IO
from urllib.parse import urlsplit

from protocol.errors import ExitCode, RemoteError, UserError
from protocol.paths import Layout
from protocol.status import duration
from protocol.wire import Role
from syncd.bridge import USER, current_url, objects_folder, password_file, read_password
from syncd.bridge.running import Record, is_running, read_record
from syncd.config import Settings, load_settings
from syncd.doctor.findings import Finding, ok, warning, wrong
from syncd.doctor.patient import Patient
from syncd.rclone.address import is_loopback
from syncd.rclone.beside import opened
from syncd.rclone.remote import RcloneRemote
from syncd.view import read_age, read_status

SERVER_SECONDS = 5.0
URL_SECONDS = 10.0
_TUNNEL_LOG = "Restart the bridge; .syncd/bridge/tunnel.log says what the tunnel does."


def check_bridge(patient: Patient, stop: threading.Event) -> Iterator[Finding]:
    """The bridge of a controller whose remote is a folder that one serves."""
    layout, settings = patient.layout, patient.settings
    if layout is None or settings is None or settings.role is not Role.CONTROLLER:
        return
    record, running = read_record(layout), is_running(layout)
    if running is None:  # the system does not tell
        running = current_url(layout) is not None
    if record is None or not running:
        if settings.remote == str(objects_folder(layout)):
            alone = "" if settings.fallback else ", and a worker reaches this folder by one alone"
            yield warning(
                "bridge",
                f"none runs{alone}",
                "Start it: `syncd watch --bridge`, with your --tunnel.",
            )
        return
    if not os.path.isabs(settings.remote):
        return  # it was made a drive's end since
    password = read_password(layout) or ""
    yield _server(layout, record, password)
    if record.tunnel or record.url != record.address:
        yield _url(layout, record, password)
    if not settings.fallback:
        yield from _known(layout, record)


def _server(layout: Layout, record: Record, password: str) -> Finding:
    """Whether the server answers at its own port."""
    try:
        code = _get(record.address, password, SERVER_SECONDS, proxies={})
    except OSError as error:
        told = f"one runs, and does not answer at {record.address}: {_why(error)}"
        todo = "It is started again when it hangs; .syncd/bridge/bridge.log says more."
        return wrong("bridge", told, todo, ExitCode.REMOTE)
    if code == http.client.OK:
        return ok("bridge", f"one runs, and answers at {record.address} with its password")
    told = f"one runs, and answers {code} at {record.address}"
    todo = f"Stop it and start it again: it may have another password than {password_file(layout)}."
    return wrong("bridge", told, todo, ExitCode.REMOTE)


def _url(layout: Layout, record: Record, password: str) -> Finding:
    """Whether the URL that a worker is given leads to the bridge, as far as can be seen here."""
    if current_url(layout) is None:
        return warning("tunnel", f"{record.tunnel_kind} has told no URL yet", _TUNNEL_LOG)
    url = record.url
    if record.tunnel_kind == "ssh" and is_loopback(urlsplit(url).hostname or ""):
        told = f"{url} could not be tried from here: it is another machine's own"
        return ok("tunnel", told)
    began = time.monotonic()
    try:
        code = _get(url, password, URL_SECONDS)
    except OSError as error:
        told = f"{url} could not be tried from here: {_why(error)}"
        return warning("tunnel", told, "A worker may reach it all the same: try it from there.")
    if code == http.client.OK:
        took = (time.monotonic() - began) * 1000
        return ok("tunnel", f"{url} leads to the bridge, in {took:.0f} ms from here")
    told = f"{url} answers {code}: it does not lead to this bridge"
    return wrong("tunnel", told, _TUNNEL_LOG, ExitCode.REMOTE)


def _known(layout: Layout, record: Record) -> Iterator[Finding]:
    """Whether a worker without a second remote can know the URL, by when it was heard last."""
    try:
        age = read_age(layout)
    except UserError:
        age = None  # told by another check
    if age is None or record.changed <= time.time() - age:
        return
    ago = duration(max(time.time() - record.changed, 0.0))
    told = f"the worker was last heard before the URL changed, which it did {ago} ago"
    todo = (
        "In a notebook, run the cell that `syncd bootstrap` now makes; else paste there what "
        "`syncd bridge --show` prints. Or give both ends a second remote."
    )
    yield warning("tunnel", told, todo)


def why_not_cut(layout: Layout) -> str:
    """Return why the tunnel must not be ended from here; "" where a worker finds its URL again."""
    record = read_record(layout)
    if record is not None and record.fixed:
        return ""
    settings, status = load_settings(layout, {}, role=Role.CONTROLLER), read_status(layout)
    if status is not None and _is_on_one_of(settings, status.worker):
        return ""
    return (
        "the tunnel would come back with another URL, and the worker is not known to have a second "
        "remote by which it could find that"
    )


def _is_on_one_of(settings: Settings, worker: str) -> bool:
    """Whether a worker writes on a remote other than the bridge's."""
    if not settings.fallback:
        return False
    with opened(settings) as rclone:
        for name in settings.fallback:
            with contextlib.suppress(RemoteError):
                entries = RcloneRemote(rclone, name, treat_as=settings.profile).list("")
                if worker in {entry.name for entry in entries if entry.is_dir}:
                    return True
    return False


class _Stay(urllib.request.HTTPRedirectHandler):
    """Follows no redirection: the password is for the bridge alone."""

    def redirect_request(
        self,
        req: urllib.request.Request,
        fp: IO[bytes],
        code: int,
        msg: str,
        headers: HTTPMessage,
        newurl: str,
    ) -> None:
        return None


def _get(url: str, password: str, seconds: float, *, proxies: dict[str, str] | None = None) -> int:
    """GET the bridge's root with its password; return the answer's code. Raises OSError for none.

    `proxies` are those to go through; those of the environment by default.
    """
    token = base64.b64encode(f"{USER}:{password}".encode()).decode("ascii")
    request = urllib.request.Request(f"{url}/", headers={"Authorization": f"Basic {token}"})
    opener = urllib.request.build_opener(_Stay, urllib.request.ProxyHandler(proxies))
    try:
        with opener.open(request, timeout=seconds) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code
    except http.client.HTTPException as error:
        raise OSError(f"what answers is no web server: {error!r}") from error


def _why(error: OSError) -> str:
    """Say why there was no answer."""
    reason = error.reason if isinstance(error, urllib.error.URLError) else error
    return str(getattr(reason, "strerror", None) or reason)
