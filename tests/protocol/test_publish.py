import resource
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from protocol.publish import (
    append_durable,
    make_dirs,
    publish_bytes,
    publish_json,
    publishing,
    remove_leftovers,
    rename_durable,
    temporary_beside,
)

SIZE = 256 * 1024

# Publishes files of one letter each, over and over, until it is killed.
PUBLISHER = f"""
import itertools, pathlib, sys
from protocol.publish import publish_bytes
path = pathlib.Path(sys.argv[1])
for letter in itertools.cycle(b"abcdefgh"):
    publish_bytes(path, bytes([letter]) * {SIZE})
    print(flush=True)
"""


def publisher(path: Path) -> subprocess.Popen[bytes]:
    process = subprocess.Popen([sys.executable, "-c", PUBLISHER, str(path)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"\n"  # one is published
    return process


def kill(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL


def assert_whole(data: bytes) -> None:
    assert len(data) == SIZE
    assert data == data[:1] * SIZE


def test_a_reader_never_sees_a_torn_file_while_another_process_publishes(tmp_path: Path):
    path = tmp_path / "status.txt"
    process = publisher(path)
    try:
        seen = set()
        while len(seen) < 8:
            data = path.read_bytes()
            assert_whole(data)
            seen.add(data[:1])
    finally:
        kill(process)


def test_a_reader_never_sees_a_torn_file_while_threads_publish(tmp_path: Path):
    path = tmp_path / "status.txt"
    publish_bytes(path, b"x" * SIZE)

    def publish(letter: bytes) -> None:
        for _ in range(20):
            publish_bytes(path, letter * SIZE)

    threads = [threading.Thread(target=publish, args=(letter,)) for letter in (b"a", b"b")]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        assert_whole(path.read_bytes())
    assert [entry.name for entry in tmp_path.iterdir()] == ["status.txt"]


@pytest.mark.parametrize("rounds", range(8))
def test_a_publisher_that_is_killed_leaves_the_old_file_or_the_new_one(tmp_path: Path, rounds: int):
    path = tmp_path / "status.txt"
    process = publisher(path)
    assert process.stdout is not None
    for _ in range(rounds):
        process.stdout.readline()
    kill(process)
    assert_whole(path.read_bytes())
    remove_leftovers(tmp_path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["status.txt"]


def test_a_publisher_that_is_killed_while_it_writes_leaves_the_old_file(tmp_path: Path):
    path = tmp_path / "status.txt"
    publish_bytes(path, b"old")
    program = (
        "import pathlib, sys\n"
        "from protocol.publish import publishing\n"
        "with publishing(pathlib.Path(sys.argv[1])) as file:\n"
        "    file.write(b'new'); file.flush(); print(flush=True); sys.stdin.read()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    process.stdout.readline()
    kill(process)
    assert path.read_bytes() == b"old"
    assert remove_leftovers(tmp_path) == 1
    assert [entry.name for entry in tmp_path.iterdir()] == ["status.txt"]


def test_a_block_that_raises_publishes_nothing_and_leaves_no_trace(tmp_path: Path):
    path = tmp_path / "a"
    publish_bytes(path, b"old")

    def break_off() -> None:
        with publishing(path) as file:
            file.write(b"new")
            raise RuntimeError("interrupted")

    with pytest.raises(RuntimeError, match="interrupted"):
        break_off()
    assert [(p.name, p.read_bytes()) for p in tmp_path.iterdir()] == [("a", b"old")]


def test_a_file_is_published_with_its_mode(tmp_path: Path):
    publish_bytes(tmp_path / "key", b"", mode=0o600)
    assert (tmp_path / "key").stat().st_mode & 0o777 == 0o600


def test_json_that_others_could_not_read_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match="JSON"):
        publish_json(tmp_path / "a.json", {"loss": float("nan")})
    assert list(tmp_path.iterdir()) == []


def test_a_temporary_name_fits_beside_the_longest_name(tmp_path: Path):
    path = tmp_path / ("é" * 127 + "x")
    publish_bytes(path, b"1")
    assert temporary_beside(path).parent == tmp_path
    assert path.read_bytes() == b"1"


def test_only_leftovers_are_removed(tmp_path: Path):
    kept = [".hidden", "a.tmp", ".folder.tmp"]
    temporary_beside(tmp_path / "a").write_bytes(b"")
    (tmp_path / kept[0]).touch()
    (tmp_path / kept[1]).touch()
    (tmp_path / kept[2]).mkdir()
    assert remove_leftovers(tmp_path) == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(kept)


def test_leftovers_of_one_name_are_removed_and_no_others(tmp_path: Path):
    for name in ("a", "a.b", "é" * 127):
        temporary_beside(tmp_path / name).touch()
    temporary_beside(tmp_path / "a").symlink_to("nowhere")
    assert remove_leftovers(tmp_path, of="a") == 2
    assert remove_leftovers(tmp_path, of="é" * 127) == 1
    assert [p.name[:5] for p in tmp_path.iterdir()] == [".a.b."]
    assert remove_leftovers(tmp_path / "missing") == 0


def test_folders_are_made_with_their_parents_and_may_be_there(tmp_path: Path):
    make_dirs(tmp_path / "a" / "b" / "c")
    make_dirs(tmp_path / "a" / "b" / "c")
    assert (tmp_path / "a" / "b" / "c").is_dir()


def test_a_rename_replaces_the_target(tmp_path: Path):
    publish_bytes(tmp_path / "new", b"new")
    publish_bytes(tmp_path / "old", b"old")
    rename_durable(tmp_path / "new", tmp_path / "old")
    assert [(p.name, p.read_bytes()) for p in tmp_path.iterdir()] == [("old", b"new")]


def test_appending_creates_and_continues_a_file(tmp_path: Path):
    path = tmp_path / "journal.jsonl"
    append_durable(path, b"1\n")
    append_durable(path, b"2\n")
    assert path.read_bytes() == b"1\n2\n"


def test_an_append_for_which_there_is_no_room_leaves_the_file_as_it_was(tmp_path: Path):
    path = tmp_path / "journal.jsonl"
    append_durable(path, b"whole\n")
    program = (
        "import pathlib, sys\n"
        "from protocol.publish import append_durable\n"
        "try:\n"
        "    append_durable(pathlib.Path(sys.argv[1]), b'x' * 100)\n"
        "except OSError:\n"
        "    print('refused')\n"
    )

    def no_room() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (50, 50))

    told = subprocess.run(
        [sys.executable, "-B", "-c", program, str(path)],
        preexec_fn=no_room,
        capture_output=True,
        check=True,
    )
    assert told.stdout == b"refused\n"
    assert path.read_bytes() == b"whole\n"
