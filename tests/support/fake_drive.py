"""A stand-in for Google Drive, which rclone's own drive backend takes for the real one.

    with FakeDrive(tmp_path) as drive:
        config.write_text(drive.section("there"))
        with Rclone(..., config=config): ...   # in an environment that has `drive.environ()`

It is not Google's, and shows only what its users report of that: files are known by ids, and two
may have one name; only a few may be made a second, and more calls are answered by 403 and a reason;
what was made is listed seconds later; an upload may be answered by an error and be there all the
same. It speaks as much of the Drive API v3 as rclone uses here, over TLS under Google's host name:
rclone is sent to it by HTTPS_PROXY, and trusts the certificate that it makes for itself.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import random
import re
import shutil
import ssl
import subprocess
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import parse_qs, urlsplit

import pytest

FOLDER = "application/vnd.google-apps.folder"
_HOST = "www.googleapis.com"
_ROOT = "root-folder-id"
_PAGE = 1000


@dataclass(kw_only=True)
class DriveFaults:
    """What goes wrong, and how much of it; may be changed at any time.

    `creations_per_second` is how many files may be made (a few at once, if none was for a while),
    `lag` how many seconds later one is listed, `doubled` and `failed` the chances that one is made
    twice, or is made and answered by an error; `folders_too`, whether folders as well.
    """

    creations_per_second: float | None = None
    lag: float = 0.0
    doubled: float = 0.0
    failed: float = 0.0
    folders_too: bool = False
    rng: random.Random = field(default_factory=lambda: random.Random(1))

    def heal(self) -> None:
        """Let nothing go wrong any more."""
        self.creations_per_second, self.lag, self.doubled, self.failed = None, 0.0, 0.0, 0.0


@dataclass
class DriveFile:
    """A file or folder. Its name is not unique."""

    id: str
    name: str
    parent: str
    mime: str
    body: bytes
    listed_at: float
    trashed: bool = False

    def resource(self) -> dict[str, Any]:
        """Return it as the API does."""
        found: dict[str, Any] = {
            "id": self.id,
            "name": self.name,
            "parents": [self.parent],
            "mimeType": self.mime,
            "trashed": self.trashed,
            "createdTime": "2026-01-01T00:00:00.000Z",
            "modifiedTime": "2026-01-01T00:00:00.000Z",
        }
        if self.mime != FOLDER:
            found["size"] = str(len(self.body))
            found["md5Checksum"] = hashlib.md5(self.body).hexdigest()
        return found


class ApiError(Exception):
    """An answer other than 200, in Google's form."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        error = {"domain": "global", "reason": reason, "message": message}
        self.body = {"error": {"code": status, "message": message, "errors": [error]}}


class FakeDrive:
    """The drive of one account, and the server that shows it. Skips the test without openssl."""

    def __init__(self, folder: Path) -> None:
        if shutil.which("openssl") is None:
            pytest.skip("the stand-in for Drive needs openssl, for a certificate of its own")
        folder.mkdir(parents=True, exist_ok=True)
        self.certificate = folder / "certificate.pem"
        self.faults = DriveFaults()
        self.answers: Counter[str] = Counter()  # what was answered how often
        self._lock = threading.Lock()
        self._ids = (f"id-{number:06d}" for number in itertools.count(1))
        self._files = {_ROOT: DriveFile(_ROOT, "My Drive", "", FOLDER, b"", 0.0)}
        self._uploads: dict[str, tuple[dict[str, Any], bytearray]] = {}
        self._may_create_at = 0.0
        self._server = _Server(("127.0.0.1", 0), _Handler)
        self._server.drive = self
        self._server.tls = self._tls_context(folder / "key.pem")

    def _tls_context(self, key: Path) -> ssl.SSLContext:
        command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt"]
        command += ["ec_paramgen_curve:prime256v1", "-nodes", "-days", "2", "-subj", f"/CN={_HOST}"]
        command += ["-addext", f"subjectAltName=DNS:{_HOST}", "-keyout", str(key)]
        command += ["-out", str(self.certificate)]
        subprocess.run(command, check=True, capture_output=True, stdin=subprocess.DEVNULL)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.certificate, key)
        return context

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def environ(self) -> dict[str, str]:
        """Return the variables that lead rclone here."""
        return {
            "HTTPS_PROXY": f"http://127.0.0.1:{self._server.server_port}",
            "RCLONE_CA_CERT": str(self.certificate),
        }

    def section(self, name: str) -> str:
        """Return its part of an rclone configuration, with a token that is good for long."""
        token = {"access_token": "t", "token_type": "Bearer", "expiry": "2099-01-01T00:00:00Z"}
        return f"[{name}]\ntype = drive\nscope = drive\ntoken = {json.dumps(token)}\n"

    def names(self) -> list[str]:
        """Return the names of all files that are not folders, nor in the trash."""
        with self._lock:
            files = list(self._files.values())
        return [file.name for file in files if file.mime != FOLDER and not file.trashed]

    def trash(self) -> int:
        """Return how many files lie in the trash."""
        with self._lock:
            return sum(file.trashed for file in self._files.values())

    def settle(self) -> None:
        """Let everything be listed that was made."""
        with self._lock:
            for file in self._files.values():
                file.listed_at = 0.0

    # The API

    def list(self, query: str, page: int) -> dict[str, Any]:
        """files.list: the parts of a query that rclone uses, in any order."""
        parents = set(re.findall(r"'([^']+)' in parents", query))
        parents = {_ROOT if parent == "root" else parent for parent in parents}
        name = re.search(r"name ?= ?'((?:[^'\\]|\\.)*)'", query)
        now = time.monotonic()
        with self._lock:
            found = [
                file.resource()
                for file in self._files.values()
                if file.parent in parents
                and not file.trashed
                and file.listed_at <= now
                and (name is None or file.name == re.sub(r"\\(.)", r"\1", name[1]))
                and _has_type(file, query)
            ]
        answer: dict[str, Any] = {"files": found[page : page + _PAGE]}
        if len(found) > page + _PAGE:
            answer["nextPageToken"] = str(page + _PAGE)
        return answer

    def get(self, file_id: str) -> DriveFile:
        """files.get. Raises ApiError when there is none."""
        with self._lock:
            file = self._files.get(_ROOT if file_id == "root" else file_id)
        if file is None:
            raise ApiError(404, "notFound", f"File not found: {file_id}.")
        return file

    def create(self, metadata: dict[str, Any], body: bytes) -> DriveFile:
        """files.create. Raises ApiError when too many are made, or by the faults' chances."""
        with self._lock:
            self._admit()
            spared = metadata.get("mimeType") == FOLDER and not self.faults.folders_too
            draw = 1.0 if spared else self.faults.rng.random()
            copies = 2 if draw < self.faults.doubled else 1
            made = [self._make(metadata, body) for _ in range(copies)]
            failed = not spared and self.faults.rng.random() < self.faults.failed
        if failed:
            raise ApiError(500, "backendError", "Backend Error")
        return made[0]

    def _admit(self) -> None:
        rate = self.faults.creations_per_second
        if not rate:
            return
        now = time.monotonic()
        self._may_create_at = max(self._may_create_at, now - 1.0)  # so many at once
        if self._may_create_at > now:
            raise ApiError(403, "userRateLimitExceeded", "User Rate Limit Exceeded")
        self._may_create_at += 1 / rate

    def _make(self, metadata: dict[str, Any], body: bytes) -> DriveFile:
        parent = metadata.get("parents", ["root"])[0]
        file = DriveFile(
            id=next(self._ids),
            name=metadata["name"],
            parent=_ROOT if parent == "root" else parent,
            mime=metadata.get("mimeType", "application/octet-stream"),
            body=body,
            listed_at=time.monotonic() + self.faults.lag,
        )
        self._files[file.id] = file
        return file

    def update(self, file_id: str, metadata: dict[str, Any], body: bytes | None) -> DriveFile:
        """files.update: the content, or the trash."""
        file = self.get(file_id)
        with self._lock:
            file.trashed = bool(metadata.get("trashed", file.trashed))
            if body is not None:
                file.body = body
        return file

    def delete(self, file_id: str) -> None:
        """files.delete, with all that is below."""
        self.get(file_id)
        with self._lock:
            doomed = {file_id}
            while more := {f.id for f in self._files.values() if f.parent in doomed} - doomed:
                doomed |= more
            for found in doomed:
                del self._files[found]

    def begin_upload(self, metadata: dict[str, Any]) -> str:
        """Begin a resumable upload; return its id."""
        with self._lock:
            upload = next(self._ids)
            self._uploads[upload] = (metadata, bytearray())
        return upload

    def go_on_with_upload(self, upload: str, part: bytes, *, total: int) -> DriveFile | int:
        """Take the next part; return the file when it is whole, else how much there is."""
        metadata, body = self._uploads[upload]
        body += part
        return self.create(metadata, bytes(body)) if len(body) >= total else len(body)


def _has_type(file: DriveFile, query: str) -> bool:
    if f"mimeType='{FOLDER}'" in query.replace(" ", ""):
        return file.mime == FOLDER
    if f"mimeType!='{FOLDER}'" in query.replace(" ", ""):
        return file.mime != FOLDER
    return True


class _Server(ThreadingHTTPServer):
    daemon_threads = False  # closing it waits for its clients, who have gone by then
    drive: FakeDrive
    tls: ssl.SSLContext

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is nothing to print."""


class _Handler(BaseHTTPRequestHandler):
    """First a proxy's, for CONNECT, and then Google's over the same connection."""

    protocol_version = "HTTP/1.1"
    server: _Server

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 (its name there)
        pass

    def finish(self) -> None:
        super().finish()
        self.connection.close()  # the server itself knows of the one without TLS only

    def do_CONNECT(self) -> None:
        if self.path != f"{_HOST}:443":
            self.send_error(502, f"this proxy knows no {self.path}")
            return
        self.send_response(200)
        self.end_headers()
        self.connection = self.server.tls.wrap_socket(self.connection, server_side=True)
        self.rfile = self.connection.makefile("rb")
        self.wfile = self.connection.makefile("wb", 0)  # type: ignore[assignment]

    def _serve(self) -> None:
        length = int(self.headers.get("Content-Length", 0))
        body = self.rfile.read(length) if length else self._chunks()
        url = urlsplit(self.path)
        query = {key: values[0] for key, values in parse_qs(url.query).items()}
        try:
            status, answer = self._answer(url.path.strip("/").split("/"), query, body)
        except ApiError as error:
            status, answer = error.status, error.body
            self.server.drive.answers[error.body["error"]["errors"][0]["reason"]] += 1
        else:
            self.server.drive.answers[self.command] += 1
        self._send(status, answer)

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _serve  # noqa: N815

    def _chunks(self) -> bytes:
        body = b""
        if "chunked" in self.headers.get("Transfer-Encoding", ""):
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
        return body

    def _send(self, status: int, answer: dict[str, Any] | bytes) -> None:
        data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        self.send_response(status)
        if isinstance(answer, dict) and "Location" in answer:
            self.send_header("Location", answer["Location"])
        if isinstance(answer, dict) and "Range" in answer:
            self.send_header("Range", answer["Range"])
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _answer(
        self, path: list[str], query: dict[str, str], body: bytes
    ) -> tuple[int, dict[str, Any] | bytes]:
        drive = self.server.drive
        if path[0] == "upload":
            return self._upload(path[4] if len(path) > 4 else "", query, body)
        file_id = path[3] if len(path) > 3 else ""
        if path[2] == "about":
            return 200, {"user": {}, "storageQuota": {"limit": "1000000000", "usage": "0"}}
        if self.command == "GET" and not file_id:
            return 200, drive.list(query["q"], int(query.get("pageToken", 0)))
        if self.command == "GET":
            return self._read(drive.get(file_id), query)
        if self.command == "POST":
            return 200, drive.create(json.loads(body), b"").resource()
        if self.command == "PATCH":
            return 200, drive.update(file_id, json.loads(body), None).resource()
        drive.delete(file_id)
        return 204, b""

    def _read(self, file: DriveFile, query: dict[str, str]) -> tuple[int, dict[str, Any] | bytes]:
        if query.get("alt") != "media":
            return 200, file.resource()
        span = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if span is None:
            return 200, file.body
        return 206, file.body[int(span[1]) : int(span[2]) + 1 if span[2] else None]

    def _upload(
        self, file_id: str, query: dict[str, str], body: bytes
    ) -> tuple[int, dict[str, Any] | bytes]:
        drive = self.server.drive
        if "upload_id" in query:
            span = re.fullmatch(r"bytes (?:\*|\d+-\d+)/(\d+)", self.headers["Content-Range"])
            assert span is not None
            done = drive.go_on_with_upload(query["upload_id"], body, total=int(span[1]))
            if isinstance(done, int):
                return 308, {"Range": f"bytes=0-{done - 1}"}
            return 200, done.resource()
        if query["uploadType"] == "resumable":
            upload = drive.begin_upload(json.loads(body))
            return 200, {"Location": f"https://{_HOST}/upload/drive/v3/files?upload_id={upload}"}
        metadata, content = _parts(self.headers["Content-Type"], body)
        if file_id:
            return 200, drive.update(file_id, metadata, content).resource()
        return 200, drive.create(metadata, content).resource()


def _parts(content_type: str, body: bytes) -> tuple[dict[str, Any], bytes]:
    """Take a multipart/related body apart: JSON, and a file's bytes."""
    boundary = content_type.partition("boundary=")[2].strip('"').encode()
    first, second = body.split(b"--" + boundary)[1:3]
    return json.loads(first.partition(b"\r\n\r\n")[2]), second.partition(b"\r\n\r\n")[2][:-2]
