"""Every parser that reads what another machine, or a stage, wrote: what it may do with any bytes.

Each target takes bytes, gives them to its parser, and checks what comes out; whatever it raises but
the errors that the parser's docstring names is a fault. tests/fuzz/test_parsers.py runs them with
hypothesis, tests/fuzz/fuzz.py with atheris.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from protocol.dictionary import DICTIONARY
from protocol.errors import ConfigError, DataError, RefusedError
from protocol.journal import fold, parse_journal
from protocol.logs import drop_redraws, parse_log_line
from protocol.messages import Snapshot, decode_messages, encode_messages
from protocol.names import RunId, canonical_stage, safe_relative
from protocol.progress import read_progress
from protocol.publish import publish_bytes
from protocol.queue import parse_queue, scan
from protocol.results import Results, read_report
from protocol.schema import decode, dumps, loads
from protocol.snapshots import decode_snapshot, encode_snapshot
from protocol.stages import parse_stages
from protocol.status import Status, render_progress, render_status
from protocol.wire import Kind, ObjectName, Role, Sealer, Writer
from syncd.config import Key
from syncd.delivery.receipt import check

DATA = Path(__file__).parents[1] / "data" / "v1"
WRITER = Writer(1, "51b0c7de", Role.WORKER)
RUN = "pretrain.0001.7f3a"


@dataclass(frozen=True)
class Target:
    """What to run on bytes, and bytes that are valid to start from."""

    run: Callable[[bytes], object]
    seeds: Callable[[], Iterator[bytes]]


def _file(name: str) -> Callable[[], Iterator[bytes]]:
    return lambda: iter([(DATA / name).read_bytes()])


def _texts(*texts: str) -> Callable[[], Iterator[bytes]]:
    return lambda: (text.encode() for text in texts)


def _bodies() -> Iterator[bytes]:
    for path in (*DATA.glob("remote/*/*"), *DATA.glob("unsealed/*/*")):
        yield path.read_bytes()


def _payloads() -> Iterator[bytes]:
    for path in (*DATA.glob("remote/*/*pack*"), *DATA.glob("unsealed/*/*pack*")):
        body = path.read_bytes()
        header, _, payload = body.partition(b"\n")
        if b'"codec":"raw"' in header:
            yield payload
        else:
            words = DICTIONARY if b'"codec":"zlib-dict"' in header else b""
            yield zlib.decompressobj(zdict=words).decompress(payload)


def _scratch() -> Path:
    """A file to give to parsers that read one."""
    shared = Path("/dev/shm")
    return (shared if shared.is_dir() else Path(tempfile.gettempdir())) / f"syncd-{os.getpid()}"


def _through_a_file(parse: Callable[[Path], object]) -> Callable[[bytes], object]:
    def run(data: bytes) -> object:
        path = _scratch()
        path.write_bytes(data)
        try:
            return parse(path)
        finally:
            path.unlink()

    return run


def queue(data: bytes) -> None:
    lines = parse_queue(data)
    for line in lines:
        assert (line.command is None) == bool(line.error)
        line.text.encode()
    decision = scan({}, lines, unchanged_for=9.0)
    assert not scan(decision.counts, lines, unchanged_for=9.0).new


def wire_object(data: bytes) -> None:
    """Bytes as an object's whole body, in a place that is right for it, with and without a key."""
    name = ObjectName(1, Kind.PACK, len(data), hashlib.sha256(data).hexdigest())
    for sealer in (Sealer(folder="unsealed"), Sealer(folder="f00d", key=bytes(range(32)))):
        for writer in (WRITER, Writer(1, "7f3a9c02", Role.CONTROLLER)):
            try:
                payload = sealer.open(writer, name, data)
            except RefusedError:
                continue
            again = sealer.seal(writer, Kind.PACK, 1, payload)[1]
            assert sealer.key == b"" or again.partition(b"\n")[2] or payload == b""


def names(data: bytes) -> None:
    text = data.decode("utf-8", "surrogateescape")
    for parse in (Writer.parse, ObjectName.parse):
        found = parse(text)
        assert found is None or str(found) == text
    try:
        run = RunId.parse(text)
        assert RunId.parse(str(run)) == run
        assert "/" not in str(run)
    except RefusedError:
        pass
    try:
        stage = canonical_stage(text)
        assert canonical_stage(stage) == stage
    except ConfigError:
        pass
    try:
        path = safe_relative(text)
    except RefusedError:
        return
    assert os.path.normpath(f"/root/{path}") == f"/root/{path}"


def messages(data: bytes) -> None:
    try:
        found = decode_messages(data)
    except ValueError:
        return
    assert decode_messages(encode_messages(found)) == found
    for message in found:
        try:
            check(message)
        except RefusedError:
            continue


def journal(data: bytes) -> None:
    records, _ = parse_journal(data)
    fold(records)
    again, problems = parse_journal(b"".join(record.encode() for record in records))
    assert again == records
    assert not problems


def status(data: bytes) -> None:
    try:
        found = decode(Status, loads(data))
    except ValueError:
        return
    text = render_status(found, now=1796025600.0)
    text.encode()
    assert all(line.isprintable() for line in text.split("\n"))


def results(path: Path) -> None:
    try:
        found = Results.load(path)
    except DataError:
        return
    found.save(path)
    assert Results.load(path).runs == found.runs


def stages(data: bytes) -> None:
    try:
        found = parse_stages(data)
    except ConfigError:
        return
    for name in found:
        assert canonical_stage(name) == name


def snapshot(data: bytes) -> None:
    digest = hashlib.sha256(data).hexdigest()
    try:
        files = decode_snapshot(Snapshot(order=1, id=digest[:16], blob=data))
    except RefusedError:
        return
    for file in files:
        assert safe_relative(file.path) == file.path
    assert sorted(decode_snapshot(encode_snapshot(1, files)), key=lambda f: f.path) == sorted(
        files, key=lambda f: f.path
    )


def progress(path: Path) -> None:
    found = read_progress(path)
    if found is not None:
        assert render_progress(found).isprintable()
        dumps(found.to_json())


def report(path: Path) -> None:
    try:
        found = read_report(path, run_id=RUN, stage="pretrain")
    except DataError:
        return
    dumps(found.to_json())


def key(data: bytes) -> None:
    try:
        found = Key.parse(data.decode("utf-8", "surrogateescape"))
    except ConfigError:
        return
    assert Key.parse(found.text()) == found


def logs(data: bytes) -> None:
    parse_log_line(data)
    assert len(drop_redraws(data)) <= len(data)


KEY_SEED = f"syncd1.{'0' * 16}.{'A' * 43}="
TARGETS = {
    "queue": Target(queue, _file("queue.txt")),
    "object": Target(wire_object, _bodies),
    "names": Target(
        names,
        _texts(
            RUN,
            "w-000001-51b0c7de",
            f"000000000012-pack-34-{'0' * 64}",
            "Fine Tune",
            "in/a b/c.log",
        ),
    ),
    "messages": Target(messages, _payloads),
    "journal": Target(journal, _file("journal.jsonl")),
    "status": Target(
        status,
        _texts(
            '{"time":1.5,"worker":"w","host":"vm","sealed":true,"running":[{"run_id":"a.0001.7f3a",'
            '"stage":"a","attempt":1,"started":1.0,"progress":{"step":1,"total":2,"unit":"x",'
            '"message":"m"},"last_line":"l"}],"waiting":[{"number":1,"line":"run:a","why":"w"}],'
            '"ended":[{"number":1,"line":"sh:bHMK","result":"success","cause":"c","ended":1.0}],'
            '"unsent_bytes":1,"unsent_since":1.0,"disk_free":9,"machine":{"a":"b"},"problems":["p"]}'
        ),
    ),
    "results": Target(_through_a_file(results), _file("results.json")),
    "stages": Target(stages, _file("stages.toml")),
    "snapshot": Target(
        snapshot,
        _texts(f'[{{"path":"stages.toml","size":46,"mode":420,"sha256":"{"0" * 64}"}}]'),
    ),
    "progress": Target(_through_a_file(progress), _file("progress.json")),
    "report": Target(_through_a_file(report), _file("report.json")),
    "key": Target(key, _texts(KEY_SEED, f"{KEY_SEED}\n{KEY_SEED.replace('AA', 'AB')}\n")),
    "logs": Target(logs, _file("pretrain.log")),
}


def write_seeds(target: Target, folder: Path) -> None:
    """Write a target's seeds as files."""
    for place, seed in enumerate(target.seeds()):
        publish_bytes(folder / f"seed-{place}", seed)
