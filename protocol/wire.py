"""The immutable objects that travel on the remote.

    <root>/<writer>/<seq>-<kind>-<length>-<sha256>

A writer is one incarnation of one end, `c-000001-7f3a9c02` or `w-000003-51b0c7de`: role, epoch,
nonce. It alone writes in its folder, and never writes a name twice. An object counts when it has
its full length, its hash, and (where there is a key) its seal. Kinds:

    pack    messages, in the order of their sequence numbers; none is missing
    state   messages that stand for all packs up to the same sequence number
    chunk   bytes of larger contents, named by messages; in no order

An object's body is one line of JSON, its header, and then the payload:

    {"v":1,"folder":"...","writer":"...","kind":"pack","seq":12,"codec":"zlib","mac":"<hex>"}

`mac` is HMAC-SHA256 under a key derived for the direction, over the header without it and the
payload; "" without a key, and in a chunk, whose hash is in the sealed message that names it. The
payload is compressed when that makes it smaller, with the words that messages are made of as a
preset dictionary: most packs are shorter than those.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import re
import zlib
from dataclasses import dataclass, field
from enum import StrEnum

from protocol.dictionary import DICTIONARY
from protocol.errors import DataError, RefusedError
from protocol.schema import loads

VERSION = 1
MAX_HEADER_BYTES = 1024
MAX_PACK_BYTES = 64 * 1024 * 1024
MAX_STATE_BYTES = 1024 * 1024 * 1024
CHUNK_BYTES = 16 * 1024 * 1024
MAX_CHUNK_BYTES = 64 * 1024 * 1024
KEY_BYTES = 32

# How a payload may be stored: "zlib" is read, for what was written without the dictionary.
_CODECS = ("raw", "zlib", "zlib-dict")

_NAME = re.compile(
    r"(?P<seq>[0-9]{12})-(?P<kind>pack|state|chunk)-(?P<length>[1-9][0-9]{0,12})"
    r"-(?P<sha256>[0-9a-f]{64})\Z"
)
_MAC = re.compile(r"[0-9a-f]{64}\Z")
_WRITER = re.compile(r"(?P<role>[cw])-(?P<epoch>[0-9]{6})-(?P<nonce>[0-9a-f]{8})\Z")


class Role(StrEnum):
    """Which end of the folder."""

    CONTROLLER = "controller"
    WORKER = "worker"

    @property
    def peer(self) -> Role:
        return Role.WORKER if self is Role.CONTROLLER else Role.CONTROLLER


class Kind(StrEnum):
    """What an object holds."""

    PACK = "pack"
    STATE = "state"
    CHUNK = "chunk"


_LIMITS = {
    Kind.PACK: MAX_PACK_BYTES,
    Kind.STATE: MAX_STATE_BYTES,
    Kind.CHUNK: MAX_CHUNK_BYTES + MAX_HEADER_BYTES,
}


@dataclass(frozen=True, order=True)
class Writer:
    """One incarnation of one end. The highest (epoch, nonce) of a role is the one that counts."""

    epoch: int
    nonce: str
    role: Role

    def __str__(self) -> str:
        return f"{self.role[0]}-{self.epoch:06d}-{self.nonce}"

    @classmethod
    def parse(cls, text: str) -> Writer | None:
        """Parse a folder's name; None when it is not a writer's."""
        match = _WRITER.match(text)
        if not match:
            return None
        role = Role.CONTROLLER if match["role"] == "c" else Role.WORKER
        return cls(int(match["epoch"]), match["nonce"], role)


@dataclass(frozen=True, order=True)
class ObjectName:
    """The name of an object: what it must turn out to be."""

    seq: int
    kind: Kind
    length: int
    sha256: str

    def __str__(self) -> str:
        return f"{self.seq:012d}-{self.kind}-{self.length}-{self.sha256}"

    @classmethod
    def parse(cls, text: str) -> ObjectName | None:
        """Parse a file's name; None when it is not an object's, or larger than its kind may be."""
        match = _NAME.match(text)
        if not match:
            return None
        name = cls(int(match["seq"]), Kind(match["kind"]), int(match["length"]), match["sha256"])
        return name if name.length <= _LIMITS[name.kind] else None


@dataclass(frozen=True, kw_only=True)
class Sealer:
    """Seals and opens the objects of one folder; `key` is 32 bytes, or b"" for none."""

    folder: str
    key: bytes = field(default=b"", repr=False)

    def _header(self, writer: Writer, kind: Kind, seq: int, codec: str) -> dict[str, object]:
        return {
            "v": VERSION,
            "folder": self.folder,
            "writer": str(writer),
            "kind": str(kind),
            "seq": seq,
            "codec": codec,
        }

    def _mac(self, writer: Writer, header: dict[str, object], payload: bytes) -> str:
        if not self.key:
            return ""
        direction = f"syncd {VERSION} from {writer.role}".encode()
        derived = hmac.digest(self.key, direction, "sha256")
        digest = hmac.new(derived, _canonical(header), hashlib.sha256)
        digest.update(b"\n")
        digest.update(payload)
        return digest.hexdigest()

    def seal(
        self, writer: Writer, kind: Kind, seq: int, payload: bytes, *, compress: bool = True
    ) -> tuple[ObjectName, bytes]:
        """Return an object's name and body. Raises DataError when the payload is too large."""
        if len(payload) > _LIMITS[kind]:
            raise DataError(f"seal a {kind}", why=f"{len(payload)} bytes is more than it may hold")
        codec, payload = compressed(payload) if compress else ("raw", payload)
        header = self._header(writer, kind, seq, codec)
        header["mac"] = "" if kind is Kind.CHUNK else self._mac(writer, header, payload)
        body = _canonical(header) + b"\n" + payload
        name = ObjectName(seq, kind, len(body), hashlib.sha256(body).hexdigest())
        if name.length > _LIMITS[kind]:
            raise DataError(f"seal a {kind}", why=f"{name.length} bytes is more than it may hold")
        return name, body

    def chunk_header(self, writer: Writer, seq: int, codec: str = "raw") -> bytes:
        """Return what a chunk begins with; its payload follows."""
        header = self._header(writer, Kind.CHUNK, seq, codec) | {"mac": ""}
        return _canonical(header) + b"\n"

    def open(self, writer: Writer, name: ObjectName, body: bytes) -> bytes:
        """Check an object's body against its name, place and seal; return the payload.

        A chunk's own seal, if there is one, says nothing: a sealed message must have named it.

        Raises DataError when it is not (yet) whole, which may mend itself, and RefusedError when
        it is whole and not what it should be: foreign, forged, or of a newer version.
        """
        what, path = "open an object", f"{writer}/{name}"
        if len(body) != name.length or hashlib.sha256(body).hexdigest() != name.sha256:
            raise DataError(what, path=path, why="not whole: its bytes are not those of its name")
        line, _, payload = body[:MAX_HEADER_BYTES].partition(b"\n")
        payload = body[len(line) + 1 :]
        try:
            header = loads(line)
            if not isinstance(header, dict):
                raise ValueError("not an object")
        except ValueError as error:
            raise RefusedError(what, path=path, why=f"broken header: {error}") from error
        if header.get("v") != VERSION:
            why = f"protocol version {header.get('v')!r}; this program speaks {VERSION}"
            raise RefusedError(what, path=path, why=why, hint="Update syncd at both ends.")
        placed = (header.get("folder"), header.get("writer"), header.get("kind"), header.get("seq"))
        if placed != (self.folder, str(writer), str(name.kind), name.seq):
            raise RefusedError(
                what,
                path=path,
                why="it belongs to another folder, writer or place",
                hint="If the keys of the two ends differ, copy .syncd/key.",
            )
        codec = header.get("codec")
        if codec not in _CODECS:
            raise RefusedError(what, path=path, why=f"unknown codec {codec!r}")
        expected = self._header(writer, name.kind, name.seq, codec)
        mac = header.get("mac")
        if name.kind is Kind.CHUNK:
            expected["mac"] = mac if isinstance(mac, str) and _MAC.match(mac) else ""
        else:
            expected["mac"] = self._mac(writer, expected, payload)
            self._check_seal(what, path, mac, str(expected["mac"]))
        if not body.startswith(_canonical(expected) + b"\n"):
            raise RefusedError(what, path=path, why="its header is not written as it must be")
        if codec == "raw":
            return payload
        words = DICTIONARY if codec == "zlib-dict" else b""
        return _inflate(what, path, payload, _LIMITS[name.kind], words)

    def _check_seal(self, what: str, path: str, mac: object, wanted: str) -> None:
        if not self.key:
            return
        if not mac:
            raise RefusedError(what, path=path, why="not sealed", hint=_SAME_KEY)
        if not isinstance(mac, str) or not hmac.compare_digest(mac.encode(), wanted.encode()):
            raise RefusedError(
                what,
                path=path,
                why="the seal does not fit: another key, or it was altered",
                hint=_SAME_KEY,
            )


def compressed(payload: bytes) -> tuple[str, bytes]:
    """Return a payload as it is to be stored, with its codec: "raw" if it does not get smaller."""
    deflater = zlib.compressobj(6, zdict=DICTIONARY)
    packed = deflater.compress(payload) + deflater.flush()
    return ("zlib-dict", packed) if len(packed) < len(payload) else ("raw", payload)


_SAME_KEY = (
    "If the other end's key is new, give it to this one: "
    "`syncd init --rotate --key-file` with a copy of its .syncd/key."
)


def _canonical(header: dict[str, object]) -> bytes:
    return json.dumps(header, separators=(",", ":"), ensure_ascii=True).encode("ascii")


def _inflate(what: str, path: str, payload: bytes, limit: int, words: bytes) -> bytes:
    inflater = zlib.decompressobj(zdict=words)
    try:
        data = inflater.decompress(payload, limit + 1)
    except zlib.error as error:
        raise RefusedError(what, path=path, why=f"cannot be inflated: {error}") from error
    if len(data) > limit:
        raise RefusedError(what, path=path, why=f"it inflates to more than {limit} bytes")
    if not inflater.eof or inflater.unused_data:
        raise RefusedError(what, path=path, why="cannot be inflated: cut short, or too long")
    return data
