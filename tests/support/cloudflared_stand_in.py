#!/usr/bin/env python3
"""A stand-in for Cloudflare's `cloudflared`: prints what the real one prints, and tunnels nothing.

The folder $CLOUDFLARED_STAND_IN says what it does: line n of its file `plan` is for start n, the
last one for all that follow; each start appends its arguments to the file `starts`, as JSON.

    NAME                a quick tunnel https://NAME.trycloudflare.com, or a named one
    json NAME           the same, its log as objects
    metrics NAME        the same, but the log does not tell the URL, only the metrics server does
    dropped NAME        the same, until the file `drop` is there: then Cloudflare knows it no more
    silent              asks for a tunnel, and waits for an answer for ever
    refused             429: too many quick tunnels were asked for
    offline             there is no network
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

VERSION = "cloudflared version 0.0.0 (a stand-in for tests, not Cloudflare's program)"
DISCLAIMER = (
    "Thank you for trying Cloudflare Tunnel. Doing so, without a Cloudflare account, is a quick "
    "way to experiment and try it out. However, be aware that these account-less Tunnels have no "
    "uptime guarantee, are subject to the Cloudflare Online Services Terms of Use "
    "(https://www.cloudflare.com/website-terms/)"
)
CREATED = "Your quick Tunnel has been created! Visit it at (it may take some time to be reachable):"
BARRED = (
    "Error unmarshaling QuickTunnel response: error code: 1015 "
    "error=\"invalid character 'e' looking for beginning of value\" "
    'status_code="429 Too Many Requests"'
)
REGISTERED = (
    "Registered tunnel connection connIndex=0 connection=bb527b3a-8a27-467b-9fca-84972898be5c "
    "event=0 ip=198.41.192.77 location=fra08 protocol=quic"
)
UNKNOWN = (
    'Register tunnel error from server side error="Unauthorized: Tunnel not found" connIndex=0'
)

as_objects = False


def say(message: str, level: str = "INF") -> None:
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    line = f"{now} {level} {message}"
    if as_objects:
        line = json.dumps({"level": level.lower(), "time": now, "message": message})
    print(line, file=sys.stderr, flush=True)


def box(lines: list[str]) -> None:
    width = max(map(len, lines))
    for line in ["-" * (width + 4), *(f"  {line:<{width}}  " for line in lines)]:
        say(f"|{line}|" if line[0] == " " else f"+{line}+")
    say(f"+{'-' * (width + 4)}+")


def serve_metrics(answers: dict[str, object]) -> None:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = json.dumps(answers.get(self.path, {})).encode()
            self.send_response(200 if self.path in answers else 404)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    say(f"Starting metrics server on 127.0.0.1:{server.server_port}/metrics")


def quick(kind: str, name: str) -> None:
    say(DISCLAIMER)
    say("Requesting new quick Tunnel on trycloudflare.com...")
    if kind == "silent":
        threading.Event().wait()
    if kind == "refused":
        say(BARRED, "ERR")
        sys.exit(
            "failed to unmarshal quick Tunnel: invalid character 'e' looking for beginning of value"
        )
    if kind == "offline":
        sys.exit(
            'failed to request quick Tunnel: Post "https://api.trycloudflare.com/tunnel": dial '
            "tcp: lookup api.trycloudflare.com: no such host"
        )
    host = f"{name}.trycloudflare.com"
    if kind != "metrics":
        box([CREATED, f"https://{host}"])
    ready = {"status": 200, "readyConnections": 1}
    serve_metrics({"/ready": ready, "/quicktunnel": {"hostname": host}})


def main(argv: list[str]) -> None:
    global as_objects
    if "--version" in argv:
        print(VERSION)
        return
    folder = Path(os.environ["CLOUDFLARED_STAND_IN"])
    with open(folder / "starts", "a") as starts:
        starts.write(json.dumps(argv) + "\n")
    count = len((folder / "starts").read_text().splitlines())
    plan = (folder / "plan").read_text().splitlines()
    *kinds, name = plan[min(count, len(plan)) - 1].split()
    kind = kinds[0] if kinds else name
    as_objects = kind == "json"
    say("Version 0.0.0 (a stand-in for tests)")
    if "run" in argv:
        serve_metrics({"/ready": {"status": 200, "readyConnections": 4}})
    else:
        quick(kind, name)
    if kind != "metrics":
        say(REGISTERED)
    while kind == "dropped":
        if (folder / "drop").exists():
            say(UNKNOWN, "ERR")
            say("Retrying connection in up to 1s connIndex=0 event=0")
        time.sleep(0.05)
    threading.Event().wait()


if __name__ == "__main__":
    main(sys.argv[1:])
