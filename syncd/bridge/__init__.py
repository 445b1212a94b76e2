"""The file bridge: a server on the laptop, and the tunnels through which a worker reaches it.

A worker that can only call out by HTTPS reads and writes the laptop's objects there; the laptop's
own `syncd watch` has them on its disk.
"""

from __future__ import annotations

from pathlib import Path

from protocol.paths import Layout

USER = "syncd"
OBJECTS, SERVE = "objects", "serve"  # the two mounts, by the names that they have in URLs


def bridge_folder(layout: Layout) -> Path:
    """Where the bridge keeps what it needs: its password, its log, the objects."""
    return layout.private / "bridge"


def objects_folder(layout: Layout) -> Path:
    """Where the objects lie, for an end that was made with `syncd init --bridge`."""
    return bridge_folder(layout) / OBJECTS


def url_file(layout: Layout) -> Path:
    """The file that says where the objects are reached now."""
    return bridge_folder(layout) / "url"


def current_url(layout: Layout) -> str | None:
    """Return the URL of the objects as a worker reaches them, without credentials.

    None when no bridge runs, or its tunnel has not told yet. After a crash it may be an old one.
    """
    try:
        return url_file(layout).read_text("utf-8").strip() or None
    except FileNotFoundError:
        return None
