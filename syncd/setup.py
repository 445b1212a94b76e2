"""`syncd init`: makes a folder one end of a shared folder."""

from __future__ import annotations

import sys
from pathlib import Path

from protocol.errors import ConfigError, UsageError
from protocol.paths import Layout
from protocol.publish import make_dirs, publish_bytes
from protocol.wire import Role
from syncd.config import Key, Settings, load_key, make_private, toml_text

QUEUE_START = b"""\
# One command a line, appended at the end: run:<stage>, stop:<stage>, sh:<base64>.
# `syncd run STAGE`, `syncd stop STAGE` and `syncd sh 'COMMAND'` append them too.
"""
STAGES_START = b"""\
# What the worker can run. A command given as text is run by /bin/sh -c in the folder of this file.
[stages.hello]
command = "echo hello from $(hostname); uptime"
gpu = 0
"""


def initialise(
    layout: Layout,
    *,
    role: Role,
    remote: str,
    key_file: Path | None = None,
    unsealed: bool = False,
    rclone_config: str = "",
) -> str:
    """Write an end's settings, key and first files; return what to tell the user.

    What is there already stays, but for the settings. Raises ConfigError when the key cannot be
    had, UsageError for options that do not go together.
    """
    if unsealed and key_file:
        raise UsageError("syncd init", why="--unsealed and --key-file do not go together")
    settings = Settings(role=role, remote=_absolute(remote), rclone_config=rclone_config)
    key = None if unsealed else _key(layout, role, key_file)
    make_dirs(layout.root)
    make_private(layout)
    if key:
        key.save(layout)
    publish_bytes(layout.settings, toml_text(settings).encode("utf-8"))
    make_dirs(layout.inbox)
    if role is Role.CONTROLLER:
        make_dirs(layout.serve)
        if not any(layout.serve.iterdir()):
            publish_bytes(layout.serve / "stages.toml", STAGES_START)
        if not layout.queue.exists():
            publish_bytes(layout.queue, QUEUE_START)
    return _told(layout, settings, key)


def _absolute(remote: str) -> str:
    """A local folder is meant from here, wherever the daemon is started later."""
    local = ":" not in remote or (len(remote) > 1 and remote[1] == ":" and remote[0].isalpha())
    return str(Path(remote).expanduser().resolve()) if local and remote else remote


def _key(layout: Layout, role: Role, key_file: Path | None) -> Key:
    if key_file is not None:
        try:
            text = sys.stdin.read() if str(key_file) == "-" else key_file.read_text("ascii")
        except (OSError, ValueError) as error:
            raise ConfigError("read the key", path=key_file, why=str(error)) from error
        return Key.parse(text)
    key = load_key(layout)
    if key is not None:
        return key
    if role is Role.WORKER:
        raise ConfigError(
            "syncd init",
            why="a worker needs the controller's key",
            hint="Give --key-file with the controller's .syncd/key, or set SYNCD_KEY; "
            "or --unsealed at both ends.",
        )
    return Key.new()


def _told(layout: Layout, settings: Settings, key: Key | None) -> str:
    lines = [f"{layout.root} is the {settings.role}'s end; remote {settings.remote}"]
    if key is None:
        lines.append("NOT SEALED: whoever can write to the remote can run code on the worker.")
    elif settings.role is Role.CONTROLLER:
        lines.append(f"key: {layout.key} (secret; the worker needs a copy)")
    if settings.role is Role.CONTROLLER:
        lines.append("next: edit serve/stages.toml, start `syncd watch`, append to queue.txt")
    else:
        lines.append("next: start `syncd watch`")
    return "\n".join(lines)
