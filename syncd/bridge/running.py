"""What a bridge leaves on the disk about itself: for `syncd bridge --show`, `syncd doctor`, drills.

The URL of now stands in a file of its own (`syncd.bridge.url_file`), which is gone when none is.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from protocol.errors import DataError
from protocol.paths import Layout
from protocol.publish import publish_bytes
from protocol.schema import decode, dumps, loads
from syncd.bridge import bridge_folder
from syncd.platform import is_locked


@dataclass(frozen=True, kw_only=True)
class Record:
    """A bridge, as it was started last on a shared folder.

    `address` is the URL at which this machine reaches it, `tunnel` as in `syncd.bridge.tunnel`, ""
    for none. `fixed` says whether its URL is the same after each start, `advice` what a person must
    do to reach it. `url` is the URL that was told last, without `/objects`, and `changed` when it
    took another one's place, in seconds since the epoch: 0 for never.
    """

    address: str
    tunnel: str = ""
    fixed: bool = True
    advice: str = ""
    url: str = ""
    changed: float = 0.0

    @property
    def tunnel_kind(self) -> str:
        """The word before the colon: a command line may hold a secret."""
        return self.tunnel.partition(":")[0]

    def save(self, layout: Layout) -> None:
        """Put it in the place of the one before. Raises OSError."""
        publish_bytes(_path(layout), dumps(asdict(self)), mode=0o600)


def read_record(layout: Layout) -> Record | None:
    """Return what the last bridge has left, None where none ever ran. Raises DataError."""
    path = _path(layout)
    try:
        return decode(Record, loads(path.read_bytes()))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise DataError("read about the bridge", path=path, why=str(error)) from error


def is_running(layout: Layout) -> bool | None:
    """Say whether a bridge runs on this folder; None where the system does not tell."""
    return is_locked(bridge_folder(layout) / "bridge.lock")


def _path(layout: Layout) -> Path:
    return bridge_folder(layout) / "bridge.json"
