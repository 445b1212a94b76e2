"""docs/protocol.md, executed: its tables are compared with the code, its examples are run."""

import dataclasses
import enum
import hashlib
import hmac
import importlib
import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from protocol import errors, names
from protocol.checkpoints import CheckpointFile, CheckpointGroup
from protocol.dictionary import DICTIONARY
from protocol.errors import ExitCode, UserError
from protocol.journal import JournalRecord, fold, parse_journal
from protocol.logs import LogEnd, LogStart, drop_redraws, parse_log_line
from protocol.messages import (
    Append,
    Content,
    FileEntry,
    Journal,
    Message,
    Piece,
    QueuedCommand,
    RunEnded,
    Snapshot,
    decode_messages,
    encode_messages,
)
from protocol.names import RunId
from protocol.paths import Layout
from protocol.progress import Progress, read_progress
from protocol.queue import RunCommand, ShellCommand, parse_queue, scan
from protocol.results import Artifact, Results, RunRecord, StageReport, read_report
from protocol.schema import decode
from protocol.snapshots import decode_snapshot
from protocol.stage_env import StageEnvironment
from protocol.stages import Stage, parse_stages
from protocol.states import Result, State, is_legal
from protocol.status import EndedLine, RunningLine, Status, WaitingLine
from protocol.wire import Kind, ObjectName, Role, Sealer, Writer

TEXT = (Path(__file__).parents[2] / "docs" / "protocol.md").read_text("utf-8")
KEY = bytes(range(32))
WORKER = Writer(1, "51b0c7de", Role.WORKER)
CONTROLLER = Writer(1, "7f3a9c02", Role.CONTROLLER)
MESSAGE_TYPES = {kind.type: kind for kind in Message.__args__}


# How the document is taken apart

FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
# The same, character for character, but no # in a block looks like a heading.
OUTLINE = FENCED.sub(lambda fence: fence[0].replace("#", "-"), TEXT)


def section(heading: str) -> str:
    """The text below a heading, up to the next one of its level or above."""
    match = re.search(rf"^(#+) {re.escape(heading)}\n", OUTLINE, re.MULTILINE)
    assert match, f"no section {heading!r}"
    end = re.search(rf"^#{{1,{len(match[1])}}} ", OUTLINE[match.end() :], re.MULTILINE)
    return TEXT[match.end() : match.end() + end.start()] if end else TEXT[match.end() :]


def blocks(info: str, text: str = TEXT) -> list[str]:
    """The contents of fenced blocks with this info string."""
    return re.findall(rf"^```{re.escape(info)}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def block(info: str, text: str = TEXT) -> str:
    (found,) = blocks(info, text)
    return found


def table(first: str, text: str = TEXT) -> list[list[str]]:
    """The rows of the first table whose first column has this heading."""
    match = re.search(rf"^\| {re.escape(first)} \|.*\n\|[-|]+\n((?:\|.*\n)+)", text, re.MULTILINE)
    assert match, f"no table that begins with {first!r}"
    rows = [line.strip().removeprefix("|").removesuffix("|") for line in match[1].splitlines()]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", row)] for row in rows]


def codes(cell: str) -> list[str]:
    return re.findall(r"`([^`]*)`", cell)


def listed(first: str, text: str) -> list[str]:
    """All that stands as code in the first column of a table."""
    return [code for row in table(first, text) for code in codes(row[0])]


def literal(cell: str) -> bytes:
    return "".join(codes(cell)).replace("⏎", "\n").replace("␍", "\r").encode()


def fields(kind: type) -> list[str]:
    return [field.name for field in dataclasses.fields(kind)]


# Tables


def test_the_fields_of_every_message_are_those_of_the_code():
    headings = re.findall(r"^### (.*)$", section("Messages"), re.MULTILINE)
    assert headings == list(MESSAGE_TYPES)
    for name, kind in MESSAGE_TYPES.items():
        assert listed("field", section(name)) == fields(kind), name


@pytest.mark.parametrize(
    ("heading", "kind"),
    [
        ("`journal.jsonl`", JournalRecord),
        ("`results.json`", RunRecord),
        ("`checkpoints.json`", CheckpointFile),
        ("`status.txt`", Status),
        ("A stage", StageReport),
    ],
)
def test_the_fields_of_every_record_are_those_of_the_code(heading: str, kind: type):
    assert set(listed("field", section(heading))) == set(fields(kind))


def test_the_fields_of_a_group_of_checkpoints_are_those_of_the_code():
    found = listed("of a group", section("`checkpoints.json`"))
    assert found == fields(CheckpointGroup)


@pytest.mark.parametrize(
    ("heading", "field", "kind"),
    [
        ("content", "pieces", Piece),
        ("`status.txt`", "running", RunningLine),
        ("`status.txt`", "waiting", WaitingLine),
        ("`status.txt`", "ended", EndedLine),
        ("A stage", "artifacts", Artifact),
    ],
)
def test_nested_fields_are_those_of_the_code(heading: str, field: str, kind: type):
    (row,) = [row for row in table("field", section(heading)) if codes(row[0]) == [field]]
    assert [code for code in codes(row[2]) if code in fields(kind)] == fields(kind)


def test_the_fields_of_a_file_of_a_snapshot_are_those_of_the_code():
    named = [code for code in codes(section("snapshot")) if code in fields(FileEntry)]
    assert list(dict.fromkeys(named)) == fields(FileEntry)


def test_the_example_of_every_message_is_one():
    for name, kind in MESSAGE_TYPES.items():
        value = json.loads(block("json", section(name)))
        payload = json.dumps([value]).encode() + b"\n" + bytes(value.get("blob", 0))
        (message,) = decode_messages(payload)
        assert isinstance(message, kind)
        assert set(value) - {"type"} <= set(fields(kind))


def test_states_and_their_order_are_those_of_the_code():
    rows = {codes(row[0])[0]: set(codes(row[1])) for row in table("state")}
    assert list(rows) == list(State)
    for after, befores in rows.items():
        assert befores == {before for before in State if is_legal(before, State(after))}


def test_results_are_those_of_the_code():
    assert listed("result", TEXT) == list(Result)


def test_exit_codes_are_those_of_the_code():
    rows = table("code")
    assert {(int(code), codes(name)[0]) for code, name, _, _ in rows} == {
        (code.value, code.name) for code in ExitCode
    }
    for code, _, kind, _ in rows:
        for name in codes(kind):
            assert getattr(errors, name).exit_code == int(code)
    assert {name for row in rows for name in codes(row[2])} == {
        kind.__name__ for kind in UserError.__subclasses__()
    }


UNITS = {"": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


@pytest.mark.parametrize(("name", "value"), [row[:2] for row in table("constant")])
def test_a_limit_is_that_of_the_code(name: str, value: str):
    module, _, constant = codes(name)[0].partition(".")
    number, _, unit = value.partition(" ")
    found = getattr(importlib.import_module(f"protocol.{module}"), constant)
    assert found == int(number) * UNITS[unit]


def test_every_limit_of_the_code_is_listed():
    sources = Path(names.__file__).parent.glob("*.py")
    found = {
        f"{path.stem}.{name}"
        for path in sources
        for name in re.findall(
            r"^([A-Z][A-Z_]*(?:BYTES|LENGTH|FILES|DEPTH|MESSAGES|SECONDS)) =",
            path.read_text("utf-8"),
            re.MULTILINE,
        )
    }
    assert {codes(row[0])[0] for row in table("constant")} == found


def test_the_layout_is_that_of_the_code():
    paths = [code.rstrip("/") for row in table("path") for code in codes(row[0])]
    layout = Layout(Path())
    for path in (
        layout.queue,
        layout.serve,
        layout.status,
        layout.results,
        layout.journal,
        layout.checkpoint_index,
        layout.store,
        layout.settings,
        layout.private,
    ):
        assert str(path) in paths
    assert f"{layout.artifacts}/<run id>" in paths
    assert str(layout.log("stage")).replace("stage", "<stage>") in paths
    assert str(layout.shell_log(1)).replace("1", "<number>") in paths


def test_the_variables_of_a_stage_are_those_of_the_code():
    path = Path("/")
    environment = StageEnvironment(
        run_id="a.0001.7f3a",
        stage="a",
        attempt=1,
        checkpoint_dir=path,
        artifact_dir=path,
        result_file=path,
        progress_file=path,
        store=path,
        payload=path,
        results=path,
    )
    assert listed("variable", TEXT) == list(environment.to_environ())


def test_the_keys_and_defaults_of_a_stage_are_those_of_the_code():
    rows = table("key", section("A stage"))
    assert {codes(row[0])[0] for row in rows} == set(fields(Stage)) - {"name"}
    given = [(codes(key)[0], codes(default)[0]) for key, default, _ in rows if codes(default)]
    lines = ["[stages.a]", 'command = "true"']
    (bare,) = parse_stages("\n".join(lines).encode()).values()
    (spelled,) = parse_stages("\n".join([*lines, *map(" = ".join, given)]).encode()).values()
    assert spelled == bare
    assert bare.timeout is None


# Command identity, redraws


@pytest.mark.parametrize("row", table("what was done"), ids=lambda row: row[0])
def test_an_example_of_command_identity_is_scanned_as_said(row: list[str]):
    _, before, now, unchanged, new = row
    last = scan({}, parse_queue(literal(before)), unchanged_for=9).counts
    decision = scan(last, parse_queue(literal(now)), unchanged_for=float(unchanged))
    assert [line.text for line in decision.new] == codes(new)


def test_the_examples_of_redraws_are_dropped_as_said():
    rows = table("segment")
    assert len(rows) >= 4
    for segment, sent in rows:
        assert drop_redraws(literal(segment)) == literal(sent)


# The seal: with nothing but hmac and hashlib, as another implementation would


def test_the_worked_example_of_a_seal_can_be_computed_from_the_text():
    key = bytes.fromhex(block("hex key"))
    direction = hmac.new(key, b"syncd 1 from worker", hashlib.sha256).digest()
    assert direction.hex() == block("hex direction").strip()
    body = block("object").encode()
    header, _, payload = body.partition(b"\n")
    mac = json.loads(header)["mac"]
    bare = header.replace(f',"mac":"{mac}"'.encode(), b"")
    assert hmac.new(direction, bare + b"\n" + payload, hashlib.sha256).hexdigest() == mac
    folder, _, name = block("path").strip().partition("/")
    assert folder == json.loads(header)["writer"]
    assert name == f"{2:012d}-pack-{len(body)}-{hashlib.sha256(body).hexdigest()}"


def test_the_worked_example_of_a_seal_is_what_the_code_makes_and_reads():
    folder, _, file = block("path").strip().partition("/")
    writer, name = Writer.parse(folder), ObjectName.parse(file)
    assert writer is not None
    assert name is not None
    sealer = Sealer(folder="f00d", key=bytes.fromhex(block("hex key")))
    payload = sealer.open(writer, name, block("object").encode())
    assert sealer.seal(writer, Kind.PACK, 2, payload, compress=False)[0] == name
    assert [message.type for message in decode_messages(payload)] == ["ack"]


def test_the_dictionary_is_that_of_the_code():
    assert "".join(json.loads(block("json dictionary"))).encode() == DICTIONARY


def test_the_keys_of_the_header_are_those_of_the_example():
    header = json.loads(block("object").partition("\n")[0])
    assert listed("key", section("Header and seal")) == list(header)


# The example exchange


def travelled(writer: Writer, seq: int, messages: list[Message]) -> list[Message]:
    """A pack's messages, after a way over the wire."""
    sealer = Sealer(folder="f00d", key=KEY)
    name, body = sealer.seal(writer, Kind.PACK, seq, encode_messages(messages))
    return decode_messages(sealer.open(writer, name, body))


def written(info: str, blobs: bytes = b"") -> list[Message]:
    """The messages of a block of the document."""
    return decode_messages(json.dumps(json.loads(block(info))).encode() + b"\n" + blobs)


def controllers() -> list[Message]:
    blobs = block("blobs controller").removesuffix("\n").encode()
    return travelled(CONTROLLER, 1, written("messages controller", blobs))


def workers() -> tuple[list[Message], list[Message]]:
    """The worker's packs after its hello, with the records that the document does not repeat."""
    records = [Journal(record=record) for record in journal()]
    hello, *rest = written("messages worker 1")
    assert travelled(WORKER, 1, [hello]) == [hello]
    later = written("messages worker 2", block("log shown").encode())
    return (
        travelled(WORKER, 2, [*records[:4], *rest]),
        travelled(WORKER, 3, [*records[4:], *later]),
    )


def journal() -> list[JournalRecord]:
    records, problems = parse_journal(block("journal").encode())
    assert problems == []
    return records


def test_the_queue_of_the_exchange_becomes_its_commands():
    stages = parse_stages(block("toml").encode())
    commands = [message for message in controllers() if isinstance(message, QueuedCommand)]
    new = scan({}, parse_queue(block("queue").encode()), unchanged_for=0).new
    for number, (line, command) in enumerate(zip(new, commands, strict=True), start=1):
        assert (command.number, command.line) == (number, line.text)
        assert isinstance(line.command, RunCommand | ShellCommand)
        known = isinstance(line.command, ShellCommand) or line.command.stage in stages
        assert bool(command.error) == (not known)
        stage = line.command.stage if isinstance(line.command, RunCommand) else "sh"
        assert command.run_id == str(RunId(stage=stage, number=number, origin=CONTROLLER.nonce[:4]))
        assert command.snapshot == (1 if stage in stages else 0)


def test_the_payload_of_the_exchange_is_whole_before_its_commands():
    _, content, snapshot, *commands = controllers()
    assert isinstance(content, Content)
    assert content.blob == block("toml").encode()
    assert hashlib.sha256(content.blob).hexdigest() == content.sha256
    assert isinstance(snapshot, Snapshot)
    (entry,) = decode_snapshot(snapshot)
    assert (entry.path, entry.size, entry.sha256) == ("stages.toml", content.size, content.sha256)
    assert all(isinstance(message, QueuedCommand) for message in commands)


def test_the_journal_of_the_exchange_folds_to_its_table():
    records = journal()
    for record in records:
        (sent,) = decode_messages(encode_messages([Journal(record=record)]))
        assert sent == Journal(record=record)
    found = [
        [str(number), f"`{record.state}`", f"`{record.result}`" if record.result else ""]
        for number, record in sorted(fold(records).items())
    ]
    assert found == table("number", section("Example exchange"))
    commands = {m.number: m for m in controllers() if isinstance(m, QueuedCommand)}
    for record in records:
        command = commands[record.number]
        assert (record.line, record.run_id) == (command.line, command.run_id)
        assert record.worker == str(WORKER)


def test_the_claim_of_a_shell_command_travels_before_it_is_started():
    first, second = workers()
    steps = [
        [(m.record.number, m.record.state) for m in pack if isinstance(m, Journal)]
        for pack in (first, second)
    ]
    assert [*steps[0], *steps[1]] == [(record.number, record.state) for record in journal()]
    assert (2, State.CLAIMED) in steps[0]
    assert (2, State.STARTED) in steps[1]


def test_the_log_of_the_exchange_is_what_the_worker_sent():
    shown = block("log shown").encode()
    raw = shown.replace(b"loss 0.31\n", literal("`loss 0.90␍loss 0.31⏎`"))
    assert "`loss 0.90␍loss 0.31⏎`" in TEXT
    (append,) = [message for message in workers()[1] if isinstance(message, Append)]
    assert (append.start, append.end, append.blob) == (0, len(raw), drop_redraws(raw))
    start, own, end = [parse_log_line(line) for line in shown.splitlines()]
    assert isinstance(start, LogStart)
    assert own is None
    assert isinstance(end, LogEnd)
    (last,) = [record for record in journal() if record.result is Result.SUCCESS]
    assert (end.run_id, end.attempt, end.time) == (last.run_id, last.attempt, last.time)
    assert (end.result, end.cause, end.seconds) == (last.result, last.cause, 60.0)
    assert (start.run_id, start.time) == (last.run_id, last.started)


def test_the_lines_that_frame_a_log_are_parsed():
    start, end = [parse_log_line(line.encode()) for line in block("log").splitlines()]
    assert isinstance(start, LogStart)
    assert isinstance(end, LogEnd)
    assert start.line() + end.line() == block("log").encode()


def test_the_results_of_the_exchange_are_those_that_the_worker_sent(tmp_path: Path):
    text = block("json results")
    path = tmp_path / "results.json"
    path.write_text(text, "utf-8")
    (ended,) = [message for message in workers()[1] if isinstance(message, RunEnded)]
    assert Results.load(path).runs == {ended.record.run_id: ended.record}
    value: dict[str, Any] = json.loads(text)
    runs = json.dumps(value["runs"], sort_keys=True, separators=(",", ":"))
    assert hashlib.sha256(runs.encode("ascii")).hexdigest() == value["digest"]
    assert decode(RunRecord, value["runs"][ended.record.run_id]) == ended.record


# Programs that are not ours


def test_a_shell_script_writes_progress_and_a_report_as_shown(tmp_path: Path):
    environ = {
        "PATH": "/usr/bin:/bin",
        "SYNCD_RUN_ID": "pretrain.0001.7f3a",
        "SYNCD_STAGE": "pretrain",
        "SYNCD_RESULT_FILE": str(tmp_path / "report.json"),
        "SYNCD_PROGRESS_FILE": str(tmp_path / "progress.json"),
    }
    script = "set -eu\ni=3\n" + "".join(blocks("sh", section("A stage")))
    subprocess.run(["/bin/sh", "-c", script], env=environ, check=True)
    assert read_progress(tmp_path / "progress.json") == Progress(step=3, total=10, unit="file")
    report = read_report(tmp_path / "report.json", run_id="pretrain.0001.7f3a", stage="pretrain")
    assert report.metrics == {"files": 3.0}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["progress.json", "report.json"]


def test_every_value_of_the_codes_enumerations_stands_in_the_document():
    for kind in (State, Result, Kind, Role):
        assert issubclass(kind, enum.StrEnum)
        for value in kind:
            assert re.search(rf"\b{value}\b", TEXT), value
