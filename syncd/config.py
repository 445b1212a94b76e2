"""Settings of one end, and its key.

Each setting comes from, in this order: a flag, the environment (`SYNCD_<NAME>`), `syncd.toml` in
the shared folder, the default. The key is a file of its own, `.syncd/key`, readable by its owner
alone; its line also names the folder, so that it is all that the other end needs. During a rotation
a second line holds the key that the first one replaces.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import math
import os
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from protocol.durations import DURATION_HINT, parse_duration
from protocol.errors import ConfigError
from protocol.names import canonical_stage, suggest
from protocol.paths import Layout
from protocol.publish import make_dirs, publish_bytes
from protocol.schema import load_toml
from protocol.wire import KEY_BYTES, Role, Sealer
from syncd.rclone.address import is_address, parse_address
from syncd.rclone.errors import without_secrets
from syncd.rclone.profiles import TYPES

UNSEALED_FOLDER = "unsealed"
_KEY = re.compile(r"syncd1\.(?P<folder>[0-9a-f]{16})\.(?P<secret>[A-Za-z0-9_-]{43}=)\Z")
# What rclone takes: a rate, or one up and one down; at all times, or from some time of day on.
_RATE = r"(?:off|\d+(?:\.\d+)?(?:b|[kmgtp](?:ib?)?)?)"
_RATES = rf"{_RATE}(?::{_RATE})?"
_FROM = r"(?:(?:mon|tue|wed|thu|fri|sat|sun)-)?\d\d:\d\d"
_BWLIMIT = re.compile(rf"|{_RATES}|{_FROM},{_RATES}(?: {_FROM},{_RATES})*", re.IGNORECASE)
_SECONDS = {"poll": (0.05, 3600.0), "idle_after": (0.0, 1e9)}  # 0 is allowed as well


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of one end.

    `remote` is what rclone calls a remote and a path ("drive:syncd"), a local folder, or the URL of
    a bridge ("https://user:password@host/objects"); `fallback` further ones, in the order in which
    they are written to when those before do not answer: each gets everything, and the last should
    be the one that lives longest;
    `rclone_config` another configuration file than rclone's own; `stages` are the only ones that
    this worker runs (empty: all) and `shell` whether it runs sh: lines; `unsealed_lines` lets the
    controller read a plain queue.txt in the remote's root, and the worker run what stood there:
    both must; `unsealed` lets this end do without a key; `bwlimit` is rclone's ("1M", "off" when
    empty); `poll` is how often, in seconds, the remote is looked at while something goes on (0: as
    its type bears), and `idle_after` for how long nothing has to go on until it is looked at less
    often; `profile` is the type of remote that it is to be treated as; `stop_when_idle` is after
    how many seconds with nothing to do a worker leaves, once all that it made is safe elsewhere
    (0: never).
    """

    role: Role
    remote: str
    fallback: tuple[str, ...] = ()
    rclone_config: str = ""
    stages: tuple[str, ...] = ()
    shell: bool = True
    unsealed_lines: bool = False
    unsealed: bool = False
    bwlimit: str = ""
    poll: float = 0.0
    idle_after: float = 600.0
    profile: str = ""
    stop_when_idle: float = 0.0

    def __post_init__(self) -> None:
        if not self.remote.strip():
            raise ConfigError(
                "settings", why="remote is empty", hint="Give --remote, or set it in syncd.toml."
            )
        if is_address(self.remote):
            parse_address(self.remote)
        if len({self.remote, *self.fallback}) <= len(self.fallback):
            raise ConfigError("settings", why="fallback names a remote twice, or the first one")
        try:
            for name in _SECONDS:
                _seconds(name, getattr(self, name))
            _duration("stop_when_idle", self.stop_when_idle)
        except ValueError as error:
            raise ConfigError("settings", why=str(error)) from error
        if self.profile not in ("", *TYPES):
            raise ConfigError("settings", why=_no_profile(self.profile))
        for stage in self.stages:
            canonical_stage(stage)


_FIELDS = {f.name: f for f in dataclasses.fields(Settings)}
NAMES = tuple(_FIELDS)


def load_settings(
    layout: Layout,
    flags: Mapping[str, Any],
    environ: Mapping[str, str] = os.environ,
    *,
    role: Role | None = None,
) -> Settings:
    """Merge flags, environment, syncd.toml and defaults; a flag that is None was not given.

    `role` is taken where nothing else says which one it is.

    Raises ConfigError naming the setting, where it came from, and what would be right.
    """
    given: dict[str, tuple[Any, str]] = {
        name: (value, str(layout.settings)) for name, value in _read_toml(layout.settings).items()
    }
    for name in _FIELDS:
        if text := environ.get(variable := f"SYNCD_{name.upper()}"):
            given[name] = (text, f"${variable}")
    for name, value in flags.items():
        if value is not None:
            given[name] = (value, f"--{name.replace('_', '-')}")
    if role is not None:
        given.setdefault("role", (role, str(layout.private)))
    for name in ("role", "remote"):
        if not given.get(name, ("", ""))[0]:
            raise ConfigError(
                "settings",
                path=layout.settings,
                why=f"{name} is not set",
                hint=f"Run `syncd init`, or set SYNCD_{name.upper()}.",
            )
    checked: dict[str, Any] = {}
    for name, (value, origin) in given.items():
        try:
            checked[name] = _convert(name, value)
        except ValueError as error:
            raise ConfigError("settings", path=origin, why=str(error)) from error
        except ConfigError as error:
            why = f"{name}: {error.what}: {error.why}"
            raise ConfigError("settings", path=origin, why=why, hint=error.hint) from error
    return Settings(**checked)


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        values = load_toml(path.read_text("utf-8-sig"))
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
    if name == "profile" and value not in ("", *TYPES):
        raise ValueError(_no_profile(value))
    if name in ("stages", "fallback"):
        values = texts(name, value)
        return tuple(canonical_stage(v) for v in values) if name == "stages" else values
    if name in ("shell", "unsealed_lines", "unsealed"):
        words = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
        found = words.get(value.lower()) if isinstance(value, str) else value
        if not isinstance(found, bool):
            raise ValueError(f"{name} = {value!r} is not true or false")
        return found
    if name in _SECONDS:
        return _seconds(name, value)
    if name == "stop_when_idle":
        return _duration(name, value)
    if not isinstance(value, str) or not value.isprintable():
        raise ValueError(f"{name} = {without_secrets(repr(value))} is not text of one line")
    if name == "bwlimit" and not _BWLIMIT.fullmatch(value):
        raise ValueError(
            f"{name} = {value!r} is no rate: 1M is a MiB a second, 500k:2M up and down"
        )
    return value


def _no_profile(value: Any) -> str:
    return f"profile = {value!r} is no type of remote that has one, as have {', '.join(TYPES)}"


def texts(name: str, value: Any) -> tuple[str, ...]:
    """Return a setting that is a list, given as one or as text with commas. Raises ValueError."""
    value = value.split(",") if isinstance(value, str) else value
    if not isinstance(value, list | tuple) or not all(isinstance(v, str) for v in value):
        what = "stage names" if name == "stages" else "remotes"
        raise ValueError(f"{name} = {without_secrets(repr(value))} is not a list of {what}")
    return tuple(v.strip() for v in value if v.strip())


def _seconds(name: str, value: Any) -> float:
    least, most = _SECONDS[name]
    try:
        seconds = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        seconds = math.nan
    if not (seconds == 0 or least <= seconds <= most):
        raise ValueError(f"{name} = {value!r} is not 0, nor {least:g} to {most:g} seconds")
    return seconds


def _duration(name: str, value: Any) -> float:
    seconds = parse_duration(value)
    if seconds is None:
        raise ValueError(f"{name} = {value!r} is no duration. {DURATION_HINT}")
    return seconds


def toml_text(settings: Settings) -> str:
    """Return a syncd.toml for these settings, those at their defaults as comments."""
    lines = ["# Settings of this end. Flags and SYNCD_<NAME> in the environment go before these."]
    for name, known in _FIELDS.items():
        value = getattr(settings, name)
        comment = "# " if value == known.default else ""
        lines.append(f"{comment}{name} = {_toml_value(value)}")
    return "\n".join(lines) + "\n"


def _toml_value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple):
        return "[" + ", ".join(_toml_value(v) for v in value) + "]"
    if isinstance(value, float | int):
        return repr(value)
    # Of one line and printable, which makes JSON's way of writing it TOML's too.
    return json.dumps(str(value), ensure_ascii=False)


@dataclass(frozen=True)
class Key:
    """The secret of one shared folder; `previous` is the one that it replaces, or b"".

    Its repr shows neither.
    """

    folder: str
    secret: bytes = field(repr=False)
    previous: bytes = field(default=b"", repr=False)

    @classmethod
    def new(cls) -> Key:
        return cls(secrets.token_hex(8), secrets.token_bytes(KEY_BYTES))

    @classmethod
    def parse(cls, text: str) -> Key:
        """Read a key, of one line or two. Raises ConfigError, which does not repeat it."""
        found = [_KEY.match(word) for word in text.split()]
        whole = [match for match in found if match is not None]
        folders = {match["folder"] for match in whole}
        different = {match["secret"] for match in whole}
        if len(found) not in (1, 2) or len(different) != len(found) or len(folders) != 1:
            raise ConfigError(
                "read the key",
                why="it is not a key of ours",
                hint="Copy the whole of .syncd/key from the other end.",
            )
        secret, *previous = [base64.urlsafe_b64decode(match["secret"]) for match in whole]
        return cls(folders.pop(), secret, *previous)

    def rotated(self) -> Key:
        """Return a new key that replaces this one."""
        return Key(self.folder, secrets.token_bytes(KEY_BYTES), self.secret)

    def text(self) -> str:
        """Return what `.syncd/key` holds."""
        lines = (self._line(secret) for secret in (self.secret, self.previous) if secret)
        return "".join(f"{line}\n" for line in lines)

    def _line(self, secret: bytes) -> str:
        return f"syncd1.{self.folder}.{base64.urlsafe_b64encode(secret).decode()}"

    def save(self, layout: Layout) -> None:
        """Write `.syncd/key`, for its owner alone."""
        make_private(layout)
        publish_bytes(layout.key, self.text().encode("ascii"), mode=0o600)


def required_key(
    layout: Layout, settings: Settings, environ: Mapping[str, str] = os.environ
) -> Key | None:
    """As `load_key`, None only where the settings say so: raises ConfigError otherwise.

    An end does not fall back to unsealed objects because its key was left out: whoever can write
    to the remote could then run code on a worker.
    """
    key = load_key(layout, environ)
    if key is None and not settings.unsealed:
        raise ConfigError(
            "start this end",
            path=layout.key,
            why="there is no key",
            hint="Set SYNCD_KEY to the text of the controller's .syncd/key, or keep a copy here by "
            "`syncd init --key-file`; to go without, set unsealed = true at both ends.",
        )
    return key


def load_key(layout: Layout, environ: Mapping[str, str] = os.environ) -> Key | None:
    """Return the key of `$SYNCD_KEY` or `.syncd/key`, or None when there is none."""
    if text := environ.get("SYNCD_KEY"):
        return _parse_key(text, "$SYNCD_KEY")
    return read_key(layout.key) if layout.key.exists() else None


def read_key(path: Path) -> Key:
    """Read a key's file. Raises ConfigError, which does not repeat what stands in it."""
    try:
        text = path.read_text("ascii")
    except UnicodeDecodeError:
        raise ConfigError("read the key", path=path, why="it is not text") from None
    except OSError as error:
        raise ConfigError("read the key", path=path, why=error.strerror or str(error)) from error
    return _parse_key(text, path)


def _parse_key(text: str, origin: str | Path) -> Key:
    try:
        return Key.parse(text)
    except ConfigError as error:
        raise ConfigError(error.what, path=origin, why=error.why, hint=error.hint) from None


def sealer(key: Key | None) -> Sealer:
    """Return what seals and opens this folder's objects."""
    return Sealer(folder=key.folder, key=key.secret) if key else Sealer(folder=UNSEALED_FOLDER)


def previous_sealer(key: Key | None) -> Sealer | None:
    """Return what opens the objects of before a rotation, or None when none is under way."""
    return Sealer(folder=key.folder, key=key.previous) if key and key.previous else None


def drop_previous(layout: Layout, key: Key) -> bool:
    """Take the previous key out of `.syncd/key`; return whether it was there beside `key`."""
    kept = read_key(layout.key) if layout.key.exists() else None
    if kept != key or not key.previous:
        return False
    replace(key, previous=b"").save(layout)
    return True


def make_private(layout: Layout) -> None:
    """Make `.syncd/`, for its owner alone."""
    make_dirs(layout.private, mode=0o700)
    layout.private.chmod(0o700)
