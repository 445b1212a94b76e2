"""Files that version 1 wrote, kept in tests/data/v1: they must be readable forever.

No test writes them. A change that needs new files is a new version of the protocol, with a folder
of its own beside this one.
"""

import hashlib
from pathlib import Path

from protocol import messages as m
from protocol.journal import JournalRecord, fold, parse_journal
from protocol.logs import LogEnd, LogStart, parse_log_line
from protocol.messages import Message, decode_messages
from protocol.progress import Progress, read_progress
from protocol.queue import RunCommand, ShellCommand, StopCommand, parse_queue
from protocol.results import Artifact, Results, RunRecord, StageReport, read_report
from protocol.schema import decode
from protocol.snapshots import decode_snapshot
from protocol.stages import Resume, Stage, parse_stages
from protocol.states import Result, State
from protocol.status import EndedLine, RunningLine, Status, WaitingLine, render_status
from protocol.wire import Kind, ObjectName, Sealer, Writer

V1 = Path(__file__).parents[1] / "data" / "v1"
SEALER = Sealer(folder="f00d", key=bytes(range(32)))
CONTROLLER, WORKER = "c-000001-7f3a9c02", "w-000001-51b0c7de"
TIME = 1_796_025_600.0  # 2026-11-30T08:00:00Z
RUN = "pretrain.0001.7f3a"
WEIGHTS = b"weights " * 64
WEIGHTS_SHA256 = hashlib.sha256(WEIGHTS).hexdigest()
STAGES = (V1 / "stages.toml").read_bytes()
STAGES_SHA256 = hashlib.sha256(STAGES).hexdigest()
LOG = (V1 / "pretrain.log").read_bytes()

REPORT = StageReport(
    run_id=RUN,
    stage="pretrain",
    metrics={"loss": 0.31},
    data_hash="d" * 64,
    code_hash="c" * 64,
    config={"lr": 0.001},
    seed=7,
    durations={"train": 59.5},
    artifacts={"encoder": Artifact(path="encoder.safetensors", size=512, sha256=WEIGHTS_SHA256)},
    detail={"note": "é"},
)
RECORD = RunRecord(
    run_id=RUN,
    stage="pretrain",
    line="run:pretrain",
    result=Result.SUCCESS,
    cause="exit 0",
    exit_code=0,
    attempts=1,
    started=TIME + 1,
    ended=TIME + 61,
    snapshot=1,
    report=REPORT,
)
JOURNAL = [
    JournalRecord(
        number=1,
        line="run:pretrain",
        state=State.CLAIMED,
        time=TIME,
        worker=WORKER,
        run_id=RUN,
        snapshot=1,
    ),
    JournalRecord(
        number=1,
        line="run:pretrain",
        state=State.STARTED,
        time=TIME + 1,
        worker=WORKER,
        run_id=RUN,
        attempt=1,
        snapshot=1,
    ),
    JournalRecord(
        number=2,
        line="run:gaet",
        state=State.ENDED,
        time=TIME + 1,
        worker=WORKER,
        result=Result.REFUSED,
        cause="line 2: no such stage",
    ),
    JournalRecord(
        number=1,
        line="run:pretrain",
        state=State.ENDED,
        time=TIME + 61,
        worker=WORKER,
        run_id=RUN,
        attempt=1,
        snapshot=1,
        result=Result.SUCCESS,
        cause="exit 0",
        exit_code=0,
        started=TIME + 1,
    ),
]
STATUS = Status(
    time=TIME + 31,
    worker=WORKER,
    host="vm",
    sealed=True,
    running=(
        RunningLine(
            run_id=RUN,
            stage="pretrain",
            attempt=1,
            started=TIME + 1,
            progress=Progress(step=50, total=100, message="loss 0.4"),
            last_line="loss 0.4",
        ),
    ),
    waiting=(WaitingLine(number=3, line="run:fine-tune", why=f"after {RUN}"),),
    ended=(
        EndedLine(
            number=2,
            line="run:gaet",
            result=Result.REFUSED,
            cause="line 2: no such stage",
            ended=TIME + 1,
        ),
    ),
    unsent_bytes=2048,
    unsent_since=TIME + 26,
    disk_free=2**35,
    machine={"memory used": "40%"},
)


def opened(kind: Kind, seq: int, writer: str, *, sealer: Sealer = SEALER, base: str = "remote"):
    """The writer, name and payload of the one golden object of this kind and number."""
    (path,) = (V1 / base / writer).glob(f"{seq:012d}-{kind}-*")
    who, name = Writer.parse(writer), ObjectName.parse(path.name)
    assert who is not None
    assert name is not None
    return name, sealer.open(who, name, path.read_bytes())


def of_type(messages: list[Message], kind: type) -> list:
    return [message for message in messages if isinstance(message, kind)]


def test_every_type_of_message_stands_in_a_golden_pack():
    places = ((1, CONTROLLER), (2, CONTROLLER), (3, CONTROLLER), (1, WORKER), (3, WORKER))
    packs = [opened(Kind.PACK, seq, writer)[1] for seq, writer in places]
    found = {type(message) for pack in packs for message in decode_messages(pack)}
    assert found == set(Message.__args__)


def test_the_controllers_second_pack_is_read():
    (told,) = decode_messages(opened(Kind.PACK, 2, CONTROLLER)[1])
    assert told == m.BridgeUrl(url="https://quick-tunnel.example.com/objects")


def test_the_controllers_third_pack_is_read():
    chunk, _ = opened(Kind.CHUNK, 1, WORKER)
    (told,) = decode_messages(opened(Kind.PACK, 3, CONTROLLER)[1])
    assert told == m.Stored(objects=(f"{WORKER}/{chunk}",))


def test_the_controllers_pack_is_read():
    payload = opened(Kind.PACK, 1, CONTROLLER)[1]
    assert b'"type":"grant"' in payload  # which no program writes any more: it is passed over
    hello, content, snapshot, first, second, ack = decode_messages(payload)
    assert hello == m.Hello(host="laptop", version="0.1.0", time=TIME)
    assert content == m.Content(sha256=STAGES_SHA256, size=len(STAGES), blob=STAGES)
    assert isinstance(snapshot, m.Snapshot)
    assert snapshot.order == 1
    assert decode_snapshot(snapshot) == [
        m.FileEntry(path="stages.toml", size=len(STAGES), mode=0o644, sha256=STAGES_SHA256)
    ]
    assert first == m.QueuedCommand(number=1, line="run:pretrain", run_id=RUN, snapshot=1)
    assert second == m.QueuedCommand(number=2, line="run:gaet", error="line 2: no such stage")
    assert ack == m.Ack(writer=WORKER, seq=1)


def test_the_workers_pack_is_read():
    found = decode_messages(opened(Kind.PACK, 1, WORKER)[1])
    chunk, payload = opened(Kind.CHUNK, 1, WORKER)
    assert payload == WEIGHTS
    path = f"in/artifacts/{RUN}/encoder.safetensors"
    piece = m.Piece(object=f"{WORKER}/{chunk}", offset=0, length=512)
    (status,) = of_type(found, m.StatusReport)
    assert decode(Status, status.status) == STATUS
    assert [message for message in found if message is not status] == [
        m.Hello(host="vm", version="0.1.0", time=TIME, inherits={"w-000000-00000001": 4}),
        *[m.Journal(record=record) for record in JOURNAL],
        m.RunEnded(record=RECORD),
        m.Append(
            path="in/pretrain.log", stream="5b1e55ed5b1e55ed", start=0, end=len(LOG), blob=LOG
        ),
        m.Content(sha256=WEIGHTS_SHA256, size=512, pieces=(piece,)),
        m.PutFile(path=path, size=512, mode=0o644, sha256=WEIGHTS_SHA256),
        m.DropFile(path="store/checkpoints/old"),
        m.Ack(writer=CONTROLLER, seq=1),
    ]


def test_the_workers_third_pack_is_read():
    path = f"store/checkpoints/{RUN}/5.safetensors"
    assert decode_messages(opened(Kind.PACK, 3, WORKER)[1]) == [
        m.PutFile(path=path, size=512, mode=0o644, sha256=WEIGHTS_SHA256, first=2, until=4),
        m.CheckpointsGrouped(run_id=RUN, number=4, files=1),
    ]


def test_a_state_is_read():
    found = decode_messages(opened(Kind.STATE, 2, WORKER)[1])
    assert [type(message) for message in found] == [m.Hello, *[m.Journal] * 4, m.RunEnded]


def test_an_unsealed_pack_is_read_without_a_key():
    sealer = Sealer(folder="unsealed")
    _, payload = opened(Kind.PACK, 1, CONTROLLER, sealer=sealer, base="unsealed")
    assert decode_messages(payload) == [m.Hello(host="laptop", version="0.1.0", time=TIME)]


def test_a_queue_is_read():
    lines = parse_queue((V1 / "queue.txt").read_bytes())
    assert [(line.number, line.text, line.command) for line in lines] == [
        (2, "run:Pretrain", RunCommand("pretrain")),
        (4, "run:fine_tune", RunCommand("fine-tune")),
        (5, "sh:ZWNobyDDqQo=", ShellCommand("echo é\n")),
        (6, "stop:pretrain", StopCommand("pretrain")),
        (7, "run", None),
        (8, "run:ga", RunCommand("ga")),
    ]
    assert [line.finished for line in lines] == [True] * 5 + [False]


def test_a_journal_is_read():
    records, problems = parse_journal((V1 / "journal.jsonl").read_bytes())
    assert (records, problems) == (JOURNAL, [])
    assert fold(records) == {1: JOURNAL[3], 2: JOURNAL[2]}


def test_results_are_read():
    results = Results.load(V1 / "results.json")
    assert results.find(RUN, "pretrain") == REPORT
    lost = RunRecord(
        run_id="sh.0003.7f3a",
        stage="sh",
        line="sh:bHMK",
        result=Result.LOST,
        cause="the worker that had claimed it is gone",
    )
    assert results.runs == {RUN: RECORD, "sh.0003.7f3a": lost}


def test_a_report_and_progress_are_read():
    assert read_report(V1 / "report.json", run_id=RUN, stage="pretrain") == REPORT
    assert read_progress(V1 / "progress.json") == Progress(
        step=120, total=1000, unit="clip", message="loss 0.31"
    )


def test_stages_are_read():
    assert parse_stages(STAGES) == {
        "pretrain": Stage(name="pretrain", command="python train.py"),
        "fine-tune": Stage(
            name="fine-tune",
            command=("python", "tune.py"),
            env={"THREADS": "2"},
            after=("pretrain",),
            timeout=21600.0,
            retries=2,
            grace=30.0,
            resume=Resume.RESTART,
            gpu=0.5,
        ),
    }


def test_a_log_is_read():
    start, own, end = LOG.splitlines()
    assert parse_log_line(start) == LogStart(
        run_id=RUN, attempt=1, time=TIME + 1, command="python train.py"
    )
    assert parse_log_line(own) is None
    assert parse_log_line(end) == LogEnd(
        run_id=RUN, attempt=1, time=TIME + 61, seconds=60.0, result=Result.SUCCESS, cause="exit 0"
    )


def test_a_status_is_shown_as_it_was():
    assert render_status(STATUS, now=TIME + 32) == (V1 / "status.txt").read_text("utf-8")
