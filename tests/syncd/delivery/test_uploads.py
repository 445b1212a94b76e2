"""Files on their way to the remote: what lies in which chunk, and what is not sent twice."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import pytest
from chunks import Chunks

from protocol.errors import DataError
from syncd.delivery import uploads as module
from syncd.delivery.contents import Contents, file_sha256
from syncd.delivery.uploads import Source, Upload
from syncd.rclone.remote import Transient
from syncd.state import State

CHUNK = 1000


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(module, "CHUNK_BYTES", CHUNK)
    monkeypatch.setattr(module, "SMALL_BYTES", CHUNK // 2)


@pytest.fixture
def chunks():
    return Chunks()


@pytest.fixture
def make(tmp_path):
    def make(name, data):
        path = tmp_path / name
        path.write_bytes(data)
        return Source(path=path, sha256=hashlib.sha256(data).hexdigest(), size=len(data))

    return make


@pytest.fixture
def contents(tmp_path, chunks):
    (tmp_path / "files").mkdir()
    state = State(tmp_path / "state.db")
    yield Contents(state, tmp_path / "files", lambda: chunks)
    state.close()


def bytes_of(chunks, pieces):
    return b"".join(chunks.read_pieces(pieces))


def data(number, size):
    return hashlib.shake_128(bytes([number])).digest(size)


def test_small_files_share_chunks_and_large_ones_are_cut_up(contents, chunks, make):
    files = [data(n, size) for n, size in enumerate([400, 400, 2500, 300, 1, 500])]
    sources = [make(f"f{n}", file) for n, file in enumerate(files)]
    assert contents.upload(sources) == {}
    for source, file in zip(sources, files, strict=True):
        assert bytes_of(chunks, contents.pieces(source.sha256)) == file
    assert sorted(map(len, chunks.kept.values())) == [500, 800, 801, 1000, 1000]


def test_what_is_the_same_is_sent_once(contents, chunks, make):
    sources = [make(name, data(1, 300)) for name in ("a", "b")]
    sources += [make(name, data(2, 1500)) for name in ("c", "d")]
    contents.upload(sources)
    contents.upload(sources)
    assert sorted(map(len, chunks.kept.values())) == [300, 500, 1000]


@pytest.mark.parametrize("change", ["other", "shorter", "gone"])
@pytest.mark.parametrize("size", [300, 1000, 1500])
def test_a_file_that_changed_is_told_and_spoils_no_other(contents, chunks, make, size, change):
    before, bad, after = make("a", data(1, 200)), make("b", data(2, size)), make("c", data(3, 200))
    if change == "gone":
        bad.path.unlink()
    else:
        bad.path.write_bytes(data(4, size) if change == "other" else data(2, size - 1))
    assert list(contents.upload([before, bad, after])) == [bad.path]
    assert contents.pieces(bad.sha256) == ()
    for source, number in ((before, 1), (after, 3)):
        assert bytes_of(chunks, contents.pieces(source.sha256)) == data(number, 200)
    bad.path.write_bytes(data(2, size))
    assert contents.upload([bad]) == {}
    assert bytes_of(chunks, contents.pieces(bad.sha256)) == data(2, size)


@pytest.mark.parametrize("size", [300, 1500])
def test_a_file_with_fewer_bytes_than_were_found_is_not_sent(contents, chunks, make, size):
    """Its hash is that of what is left, as it is when it was cut short before it was hashed."""
    source = replace(make("a", data(1, size)), size=size + 1)
    assert list(contents.upload([source])) == [source.path]
    assert contents.pieces(source.sha256) == ()


def test_fewer_bytes_than_were_found_have_no_hash(make):
    source = make("a", data(1, 300))
    assert file_sha256(source.path, 300) == file_sha256(source.path) == source.sha256
    with pytest.raises(DataError, match="it changed meanwhile"):
        file_sha256(source.path, 301)


def test_an_upload_that_was_cut_off_goes_on_where_it_was(contents, chunks, make, monkeypatch):
    source = make("large", data(1, 4500))

    def send(draft, real=chunks.send):
        with draft:
            if len(chunks.kept) == 2:
                raise Transient("upload", why="the link is down")
            return real(draft)

    with monkeypatch.context() as patch:
        patch.setattr(chunks, "send", send)
        with pytest.raises(Transient):
            contents.upload([source])
    assert contents.pieces(source.sha256) == ()
    assert source.sha256 not in contents.on_remote()
    assert len(contents.objects()) == 2  # which are kept for it
    assert contents.upload([source]) == {}
    assert sorted(map(len, chunks.kept.values())) == [500, 1000, 1000, 1000, 1000]
    assert bytes_of(chunks, contents.pieces(source.sha256)) == data(1, 4500)
    assert source.sha256 in contents.on_remote()


def test_pieces_of_what_the_file_was_meanwhile_are_not_taken_for_its_own(contents, chunks, make):
    """The file was another for a while, and an upload of that was cut off by a crash."""
    source = make("large", data(1, 2500))
    source.path.write_bytes(data(1, 1000) + data(2, 1500))
    upload = Upload(chunks, contents._begun)
    for parts in upload.run([source]):
        for part in parts:
            contents._add(part)
    assert source.path in upload.failed
    assert len(contents._begun(source.sha256)) == 2
    source.path.write_bytes(data(1, 2500))
    assert contents.upload([source]) == {}
    assert bytes_of(chunks, contents.pieces(source.sha256)) == data(1, 2500)


def test_many_chunks_that_hold_little_become_few_and_that_is_told(
    contents, chunks, make, monkeypatch
):
    monkeypatch.setattr("syncd.delivery.contents.MANY_CHUNKS", 5)
    monkeypatch.setattr("syncd.delivery.contents.LITTLE_CHUNK", 250)
    sources = [make(f"f{n}", data(n, 100)) for n in range(7)]
    for source in sources[:5]:
        contents.upload([source])
    live = [(source.sha256, source.path) for source in sources]
    contents.pack_up(live)
    assert len(contents.objects()) == 5
    for source in sources[5:]:
        contents.upload([source])
    sources[3].path.unlink()  # it is still to be had where it lies
    contents.pack_up(live)
    assert len(contents.objects()) == 2
    for number, source in enumerate(sources):
        assert bytes_of(chunks, contents.pieces(source.sha256)) == data(number, 100)
    said = contents.coming()
    assert {content.sha256 for content in said} == {s.sha256 for s in sources} - {sources[3].sha256}
    assert all(content.pieces == contents.pieces(content.sha256) for content in said)
    assert contents.coming() == []
    contents.pack_up([])
    assert contents.objects() == set()
