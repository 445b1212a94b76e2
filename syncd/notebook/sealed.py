"""What a notebook is given that others may see: locked by the folder's key, or sealed by it.

The cell's text holds how the remotes are reached, passwords and all. It is *locked*: encrypted and
sealed, so that whoever reads the notebook learns nothing. What the cell fetches is named by a
*manifest*, which is sealed: whoever can write to the remote cannot have the VM run something else.

Both use HMAC-SHA256 alone, since the cell opens them with the standard library, before anything is
installed: in counter mode as a stream cipher (a pseudo-random function in counter mode, NIST SP
800-108), then over the result (encrypt-then-MAC), each with a key of its own. `pasted.py` has the
other half, without our modules.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import secrets
from typing import Any

from syncd.config import Key

NONCE_BYTES = 16
MAC_BYTES = 32
LOCK_LABEL = b"syncd notebook 1 lock"
SEAL_LABEL = b"syncd notebook 1 seal"


def secret_of(key: Key | None) -> bytes:
    """The secret that locks and seals; without a key it is empty, and so no secret."""
    return key.secret if key else b""


def lock(secret: bytes, value: Any) -> str:
    """Return a JSON value as text that only the secret opens; another text each time."""
    nonce = secrets.token_bytes(NONCE_BYTES)
    data = json.dumps(value, ensure_ascii=False).encode("utf-8")
    locking = _mac(secret, LOCK_LABEL)
    body = bytes(a ^ b for a, b in zip(data, _stream(locking, nonce, len(data)), strict=True))
    return base64.b64encode(nonce + body + _mac(locking, nonce + body)).decode("ascii")


def seal(secret: bytes, value: Any) -> bytes:
    """Return a JSON value with its seal before it, on a line of its own."""
    data = json.dumps(value, ensure_ascii=False, sort_keys=True).encode("utf-8")
    return _mac(_mac(secret, SEAL_LABEL), data).hex().encode("ascii") + b"\n" + data


def _stream(key: bytes, nonce: bytes, length: int) -> bytes:
    blocks = range(-(-length // MAC_BYTES))
    made = b"".join(_mac(key, b"stream" + nonce + n.to_bytes(8, "big")) for n in blocks)
    return made[:length]


def _mac(key: bytes, data: bytes) -> bytes:
    return hmac.digest(key, data, hashlib.sha256)
