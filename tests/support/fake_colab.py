#!/usr/bin/env python3
"""A stand-in for Google's `colab` (google-colab-cli): says what that says, and rents nothing.

Its outputs are those of VERSION: of the program itself where they need no login, and of its `exec`
and `upload` with a Jupyter server of this machine in a session's place; else read from its source.
The folder $COLAB_STAND_IN says what it does: its file `plan` has a line for each command that is to
go wrong, "<command> <how>"; each call appends its arguments, what
it read and the code that it ran to the file `calls`, as JSON. Uploads lie in `content/`, which
stands for the VM's /content.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

VERSION = "0.7.5"
FOLDER = Path(os.environ["COLAB_STAND_IN"])
WRONG = {
    "login": (
        "To authorize colab-cli, visit this URL in any browser:\n\n  https://accounts.google.com/...\n\n"
        "After approving, Google will display an authorization code.\n"
        "Enter the authorization code: \nAborted."
    ),
    "quota": (
        "[colab] Backend rejected accelerator 'A100'. You may not have quota or entitlement for "
        "this accelerator on your account. Try a different one (e.g. --gpu T4) or omit --gpu/--tpu "
        "for a CPU runtime."
    ),
    "many": (
        "[colab] Allocation refused (precondition failed). This can mean too many active "
        "sessions, or a temporary usage or capacity limit for the requested runtime. Run `colab "
        "stop` to free up a session, wait and retry, or try a different accelerator."
    ),
    "lost": "[colab] Session '{name}' appears to be lost (404/401). Cleaning up.",
    "offline": (
        "requests.exceptions.ConnectionError: HTTPSConnectionPool(host='colab.research.google.com',"
        " port=443): Max retries exceeded with url: /tun/m/assignments"
    ),
}


def names() -> list[str]:
    path = FOLDER / "sessions"
    return path.read_text().split() if path.exists() else []


def option(argv: list[str], *flags: str) -> str:
    return next((argv[at + 1] for at, word in enumerate(argv[:-1]) if word in flags), "")


def execute(argv: list[str], code: str, plan: list[str]) -> int:
    """Run the code until it ends: 0, however it did; 1 when touch with it was lost."""
    if "exec busy" in plan:
        threading.Event().wait()
    there = code.replace("/content/", f"{FOLDER / 'content'}/")
    process = subprocess.Popen([sys.executable, "-c", there], start_new_session=True)
    (FOLDER / "kernel").write_text(str(process.pid))
    if "-f" in argv and "exec untied" in plan:
        time.sleep(0.2)
        print("RuntimeError: Connection was lost.", file=sys.stderr)
        return 1
    if process.wait():
        print("UserWarning: To exit: use 'exit', 'quit', or Ctrl-D.", file=sys.stderr)
    return 0


def main(argv: list[str]) -> int:
    command, name = argv[0], option(argv, "-s", "--session")
    given = "" if sys.stdin is None or sys.stdin.isatty() else sys.stdin.read()
    file = option(argv, "-f", "--file")
    code = Path(file).read_text() if file else given
    with open(FOLDER / "calls", "a") as calls:
        calls.write(json.dumps({"argv": argv, "code": code}) + "\n")
    plan = (FOLDER / "plan").read_text().splitlines() if (FOLDER / "plan").exists() else []
    for how, said in WRONG.items():
        if f"{command} {how}" in plan:
            print(said.format(name=name), file=sys.stderr)
            return 1
    if command == "version":
        print(
            next((line[8:] for line in plan if line.startswith("version ")), f"Version: {VERSION}")
        )
    elif command == "sessions":
        for each in names():
            print(f"[{each}] gpu-t4-s-{each} | Hardware: T4 | Variant: GPU")
        if not names():
            print("[colab] No active sessions found on server.")
    elif command == "new":
        print(f"[colab] Creating session '{name}'...")
        (FOLDER / "sessions").write_text("\n".join([*names(), name]))
        print("[colab] Session READY.")
    elif name not in names():
        print(f"[colab] Session '{name}' not found.")
        return 0 if command == "stop" else 1
    elif command == "upload":
        local, remote = argv[-2:]
        (FOLDER / "content").mkdir(exist_ok=True)
        (FOLDER / "content" / Path(remote).name).write_bytes(Path(local).read_bytes())
        print(f"[colab] Uploaded '{local}' to '{remote}'")
    elif command == "exec":
        return execute(argv, code, plan)
    elif command == "stop":
        print(f"[colab] Stopping session '{name}'...")
        (FOLDER / "sessions").write_text("\n".join(n for n in names() if n != name))
        print("[colab] Session terminated.")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
