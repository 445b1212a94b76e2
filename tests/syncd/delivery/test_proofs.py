"""How it is found out that a chunk is on the remote: by each kind of remote, and by its hash."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
from places import Place
from servers import SERVERS

from protocol.wire import Role, Sealer, Writer
from syncd.delivery.chunks import Chunks
from syncd.delivery.keyring import Keyring
from syncd.delivery.proofs import SILENT_SECONDS, WAIT_SECONDS, Proofs, Step, next_step
from syncd.rclone.remote import NotFound
from syncd.state import State

# What each kind of remote has of its own: this is why some are read back.
KINDS = {"local": "sha256", "webdav": "", "sftp": "sha1", "s3": "md5", "openssh": "sha1"}


@pytest.fixture
def state(tmp_path: Path) -> Iterator[State]:
    state = State(tmp_path / "state.db")
    yield state
    state.close()


@pytest.mark.parametrize("place", ["local", *SERVERS], indirect=True)
def test_a_chunk_is_proved_on_each_kind_of_remote_and_a_damaged_one_is_found(
    place: Place, state: State, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    kind = request.node.callspec.params["place"]
    place.remote.make_root()
    state.put("chunk_seq", 0)
    writer = Writer(1, "00c0ffee", Role.WORKER)
    chunks = Chunks(
        remote=lambda: place.remote,
        state=state,
        keys=Keyring(state, Sealer(folder="f00d"), None),
        writer=lambda: writer,
        scratch=tmp_path,
    )
    proofs = Proofs(state, lambda: place.remote, tmp_path, lambda: -math.inf)
    good, bad = chunks.put(b"good" * 1000), chunks.put(b"bad!" * 1000)
    assert proofs.how([good]) == ""
    stored = place.root / bad
    damaged = stored.read_bytes()[:-1] + b"?"
    stored.unlink()
    stored.write_bytes(damaged)
    gone = good.replace("000000000001", "000000000009")
    wrong, more = proofs.find([bad, gone, good])
    assert (wrong, more) == ({bad}, False)
    assert proofs.how([good]) == (f"the remote's {KINDS[kind]}" if KINDS[kind] else "read back")
    assert proofs.how([good, bad]) == ""


@pytest.mark.parametrize("place", ["local", "sftp", "s3"], indirect=True)
def test_a_remote_has_a_hash_of_what_is_there_only(place: Place, tmp_path: Path) -> None:
    place.remote.make_root()
    kind = place.remote.hash_kind()
    (tmp_path / "file").write_bytes(b"data")
    place.remote.upload(tmp_path / "file", "w/file")
    assert place.remote.hash_of("w/file", kind) == hashlib.new(kind, b"data").hexdigest()
    with pytest.raises(NotFound):
        place.remote.hash_of("w/other", kind)


def test_what_is_next_follows_from_who_can_tell() -> None:
    asked = {"has_hash": False, "hosted": True, "waited": 0.0, "silent": 0.0}
    late = SILENT_SECONDS + 1
    assert next_step(**{**asked, "has_hash": True}) is Step.ASK
    assert next_step(**{**asked, "hosted": False}) is Step.READ
    assert next_step(**asked) is Step.WAIT
    assert next_step(**{**asked, "waited": late}) is Step.WAIT
    assert next_step(**{**asked, "silent": math.inf}) is Step.WAIT
    assert next_step(**{**asked, "waited": late, "silent": late}) is Step.READ
    assert next_step(**{**asked, "waited": WAIT_SECONDS}) is Step.READ


def test_proofs_of_chunks_that_nobody_needs_are_forgotten(state: State, tmp_path: Path) -> None:
    proofs = Proofs(state, lambda: pytest.fail("nothing is asked"), tmp_path, lambda: 0.0)
    proofs.note(["a", "b"], "a word")
    proofs.keep_only({"b"})
    assert (proofs.how(["a"]), proofs.how(["b"])) == ("", "a word")
