"""Settings of one end, and its key.

Each setting comes from, in this order: a flag, the environment (`SYNCD_<NAME>`), `syncd.toml` in
the shared folder, the default. The key is a file of its own, `.syncd/key`, readable by its owner
alone; it is one line that also names the folder, so that it is all that the other end needs.
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
import os
import secrets
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from protocol.errors import ConfigError, UserError
from protocol.names import canonical_stage, suggest
from protocol.paths import Layout
from protocol.publish import make_dirs, publish_bytes
from protocol.wire import KEY_BYTES, Role, Sealer

UNSEALED_FOLDER = "unsealed"
_KEY_PREFIX = "syncd1"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of one end.

    `remote` is what rclone calls a remote and a path ("drive:syncd"), or a local folder;
    `rclone_config` another configuration file than rclone's own; `stages` are the only ones that
    this worker runs (empty: all) and `shell` whether it runs sh: lines; `bwlimit` is rclone's
    ("1M", "off" when empty); `poll` is how often, in seconds, the remote is looked at while
    something goes on.
    """

    role: Role
    remote: str
    rclone_config: str = ""
    stages: tuple[str, ...] = ()
    shell: bool = True
    bwlimit: str = ""
    poll: float = 0.25

    def __post_init__(self) -> None:
        if not self.remote.strip():
            raise ConfigError(
                "settings", why="remote is empty", hint="Give --remote, or set it in syncd.toml."
            )
        if not 0.05 <= self.poll <= 3600:
            raise ConfigError("settings", why=f"poll = {self.poll!r} is not 0.05 to 3600 seconds")
        for stage in self.stages:
            canonical_stage(stage)


_FIELDS = {field.name: field for field in dataclasses.fields(Settings)}


def load_settings(
    layout: Layout, flags: Mapping[str, Any], environ: Mapping[str, str] = os.environ
) -> Settings:
    """Merge flags, environment, syncd.toml and defaults; a flag that is None was not given.

    Raises ConfigError naming the setting, where it came from, and what would be right.
    """
    values: dict[str, Any] = dict(_read_toml(layout.settings))
    for name in _FIELDS:
        if text := environ.get(f"SYNCD_{name.upper()}"):
            values[name] = text
    values.update({name: value for name, value in flags.items() if value is not None})
    for name in ("role", "remote"):
        if not values.get(name):
            raise ConfigError(
                "settings",
                path=layout.settings,
                why=f"{name} is not set",
                hint=f"Run `syncd init`, or give --{name}.",
            )
    try:
        checked = {name: _convert(name, value) for name, value in values.items()}
        return Settings(**checked)
    except ValueError as error:
        raise ConfigError("settings", path=layout.settings, why=str(error)) from error


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        values = tomllib.loads(path.read_text("utf-8-sig"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ConfigError("read the settings", path=path, why=str(error)) from error
    for key in values:
        if key not in _FIELDS:
            hint = suggest(key, _FIELDS).replace("Known stages", "Known settings")
            raise ConfigError("read the settings", path=path, why=f"unknown key {key!r}", hint=hint)
    return values


def _convert(name: str, value: Any) -> Any:
    """Check one setting's type; text from the environment or a flag is converted."""
    if name == "role":
        try:
            return Role(value)
        except ValueError:
            raise ValueError(f"role = {value!r} is not controller or worker") from None
    if name == "stages":
        value = [v.strip() for v in value.split(",")] if isinstance(value, str) else value
        if not isinstance(value, list | tuple) or not all(isinstance(v, str) for v in value):
            raise ValueError(f"stages = {value!r} is not a list of stage names")
        return tuple(canonical_stage(v) for v in value if v)
    if name == "shell":
        words = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
        found = words.get(value.lower()) if isinstance(value, str) else value
        if not isinstance(found, bool):
            raise ValueError(f"shell = {value!r} is not true or false")
        return found
    if name == "poll":
        try:
            return float(value)
        except (TypeError, ValueError):
            raise ValueError(f"poll = {value!r} is not a number of seconds") from None
    if not isinstance(value, str):
        raise ValueError(f"{name} = {value!r} is not text")
    return value


def toml_text(settings: Settings) -> str:
    """Return a syncd.toml for these settings, those at their defaults as comments."""
    lines = ["# Settings of this end. Flags and SYNCD_<NAME> in the environment go before these."]
    for name, field in _FIELDS.items():
        value = getattr(settings, name)
        comment = "# " if value == field.default else ""
        lines.append(f"{comment}{name} = {_toml_value(value)}")
    return "\n".join(lines) + "\n"


def _toml_value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple):
        return "[" + ", ".join(_toml_value(v) for v in value) + "]"
    if isinstance(value, float | int):
        return repr(value)
    escaped = str(value).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


@dataclass(frozen=True)
class Key:
    """The secret of one shared folder. Its repr does not show it."""

    folder: str
    secret: bytes

    def __repr__(self) -> str:
        return f"Key(folder={self.folder!r})"

    @classmethod
    def new(cls) -> Key:
        return cls(secrets.token_hex(8), secrets.token_bytes(KEY_BYTES))

    @classmethod
    def parse(cls, text: str) -> Key:
        """Read a key's line. Raises ConfigError, which does not repeat it."""
        prefix, _, rest = text.strip().partition(".")
        folder, _, encoded = rest.partition(".")
        try:
            secret = base64.urlsafe_b64decode(encoded.encode("ascii"))
        except (binascii.Error, ValueError):
            secret = b""
        if prefix != _KEY_PREFIX or not folder.isalnum() or len(secret) != KEY_BYTES:
            raise ConfigError(
                "read the key",
                why="it is not a key of ours",
                hint="Copy the whole line of .syncd/key from the other end.",
            )
        return cls(folder, secret)

    def line(self) -> str:
        return f"{_KEY_PREFIX}.{self.folder}.{base64.urlsafe_b64encode(self.secret).decode()}"

    def save(self, layout: Layout) -> None:
        """Write `.syncd/key`, for its owner alone."""
        make_private(layout)
        publish_bytes(layout.key, f"{self.line()}\n".encode("ascii"), mode=0o600)


def load_key(layout: Layout, environ: Mapping[str, str] = os.environ) -> Key | None:
    """Return the key of `$SYNCD_KEY` or `.syncd/key`, or None when there is none."""
    if text := environ.get("SYNCD_KEY"):
        return Key.parse(text)
    try:
        return Key.parse(layout.key.read_text("ascii"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ConfigError("read the key", path=layout.key, why=str(error)) from error
    except UserError as error:
        raise ConfigError("read the key", path=layout.key, why=error.why, hint=error.hint) from None


def sealer(key: Key | None) -> Sealer:
    """Return what seals and opens this folder's objects."""
    return Sealer(folder=key.folder, key=key.secret) if key else Sealer(folder=UNSEALED_FOLDER)


def make_private(layout: Layout) -> None:
    """Make `.syncd/`, for its owner alone."""
    make_dirs(layout.private, mode=0o700)
    layout.private.chmod(0o700)
