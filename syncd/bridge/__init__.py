"""The file bridge: a server on the laptop, and the tunnels through which a worker reaches it.

A worker that can only call out by HTTPS reads and writes the laptop's objects there; the laptop's
own `syncd watch` has them on its disk.
"""

from __future__ import annotations

from pathlib import Path

from protocol.errors import ConfigError
from protocol.files import read_regular
from protocol.paths import Layout

USER = "syncd"
# The mounts, by the names that they have in URLs.
OBJECTS, SERVE, BOOTSTRAP = "objects", "serve", "bootstrap"
_MOST_BYTES = 4096  # of what is read here


def bridge_folder(layout: Layout) -> Path:
    """Where the bridge keeps what it needs: its password, its log, the objects."""
    return layout.private / "bridge"


def objects_folder(layout: Layout) -> Path:
    """Where the objects lie, for an end that was made with `syncd init --bridge`."""
    return bridge_folder(layout) / OBJECTS


def bootstrap_folder(layout: Layout) -> Path:
    """Where that lies which a notebook's cell fetches (`syncd/notebook/payload.py`)."""
    return layout.private / BOOTSTRAP


def url_file(layout: Layout) -> Path:
    """The file that says where the objects are reached now."""
    return bridge_folder(layout) / "url"


def password_file(layout: Layout) -> Path:
    """The file that holds the bridge's password: made once, and kept."""
    return bridge_folder(layout) / "password"


def read_password(layout: Layout) -> str | None:
    """Return the bridge's password, None when there is none yet.

    Raises ConfigError for a file that holds none.
    """
    path, why, text = password_file(layout), "", ""
    try:
        text = read_regular(path, _MOST_BYTES).decode("ascii").strip()
    except FileNotFoundError:
        return None
    except UnicodeDecodeError:
        why = "it is not ASCII text"
    except OSError as error:
        why = error.strerror or str(error)
    else:
        why = "" if text else "it is empty"
        if not text.isprintable():
            why = "it is not one line of text"
    if why:
        raise ConfigError(
            "read the bridge's password",
            path=path,
            why=why,
            hint="Put back the password that the workers have. Or remove it: the bridge makes "
            "another one when it starts; paste anew at each worker then.",
        )
    return text


def current_url(layout: Layout) -> str | None:
    """Return the URL of the objects as a worker reaches them, without credentials.

    None when no bridge runs, or its tunnel has not told yet. After a crash it may be an old one.
    """
    # It is a courtesy, so a file that cannot be read is none; a bridge that runs writes it anew.
    try:
        return read_regular(url_file(layout), _MOST_BYTES).decode("utf-8").strip() or None
    except (OSError, UnicodeDecodeError):
        return None
