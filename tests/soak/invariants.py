"""What must hold after an episode, whatever was killed in it: pure functions of the evidence."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from enum import StrEnum

from evidence import EndSeen, Evidence

from protocol.journal import JournalRecord, fold
from protocol.logs import LogEnd, LogStart, parse_log_line
from protocol.names import RunId
from protocol.queue import RunCommand, ShellCommand, StopCommand, parse_queue
from protocol.states import Result, State

MAX_OBJECTS = 1000
_ENDED_BY_KILL = {Result.KILLED, Result.FAILED_TO_SPAWN}


class Harm(StrEnum):
    """What a violation of an invariant means to a person."""

    LOST = "lost"
    DOUBLED = "doubled"
    TORN = "torn"
    OTHER = "other"


Violation = tuple[Harm, str]


def judge(evidence: Evidence) -> list[Violation]:
    """Return everything that is wrong."""
    return [violation for check in CHECKS for violation in check(evidence)]


def every_line_is_one_command(evidence: Evidence) -> Iterator[Violation]:
    wanted = Counter(appended.line for appended in evidence.appended)
    lines = {record.number: record.line for record in evidence.laptop.journal}
    found = Counter(lines.values())
    for line in wanted | found:
        short = f"{line[:40]!r}: appended {wanted[line]} times, {found[line]} commands in journal"
        if found[line] < wanted[line]:
            yield Harm.LOST, short
        elif found[line] > wanted[line]:
            yield Harm.DOUBLED, short


def every_command_has_ended_once(evidence: Evidence) -> Iterator[Violation]:
    for number, record in fold(evidence.laptop.journal).items():
        if record.state is not State.ENDED:
            yield Harm.LOST, f"command {number}, {record.line[:40]}: {record.state} for ever"
    for seen in (evidence.laptop, evidence.vm):
        keys = Counter(record.key for record in seen.journal)
        ends = Counter((r.number, r.worker) for r in seen.journal if r.state is State.ENDED)
        for key, count in (keys + ends).items():
            if count > 1 + (key in keys and key in ends):
                yield Harm.DOUBLED, f"{key} stands {count} times in a journal"


def results_are_right(evidence: Evidence) -> Iterator[Violation]:
    newest = fold(evidence.laptop.journal)
    commands = {number: _command(record.line) for number, record in newest.items()}
    stopped_until: dict[str, int] = {}
    for number, command in commands.items():
        if isinstance(command, StopCommand):
            stopped_until[command.stage] = max(number, stopped_until.get(command.stage, 0))
    before: dict[str, Result | None] = {}
    for number, record in sorted(newest.items()):
        command = commands[number]
        if record.state is State.ENDED:
            stoppable = isinstance(command, RunCommand) and number < stopped_until.get(
                command.stage, 0
            )
            legal = _legal(evidence, record, command, before)
            if record.result not in legal | ({Result.STOPPED} if stoppable else set()):
                yield (
                    Harm.LOST,
                    f"command {number}, {record.line[:40]}, ended as {record.result}"
                    f" ({record.cause}), not as {', '.join(sorted(legal))};"
                    f" {evidence.hits.get(record.run_id, 0)} kills hit it",
                )
        if isinstance(command, RunCommand):
            before[command.stage] = record.result


def _command(line: str) -> RunCommand | ShellCommand | StopCommand | None:
    return parse_queue(line.encode() + b"\n")[0].command


def _legal(
    evidence: Evidence,
    record: JournalRecord,
    command: RunCommand | ShellCommand | StopCommand | None,
    before: dict[str, Result | None],
) -> set[Result]:
    """The results that a command may have."""
    hits = evidence.hits.get(record.run_id, 0)
    if isinstance(command, StopCommand):
        return {Result.SUCCESS}
    if isinstance(command, ShellCommand):
        harmed = hits > 0 or evidence.machines > 1
        return {Result.SUCCESS, *(_ENDED_BY_KILL | {Result.LOST} if harmed else ())}
    if command is None or command.stage not in evidence.retries:
        return {Result.REFUSED}
    if command.stage == "next" and before.get("quick") is not Result.SUCCESS:
        return {Result.SKIPPED}
    natural = Result.FAILED if command.stage == "bad" else Result.SUCCESS
    spare = evidence.retries[command.stage] - (command.stage == "flaky")
    return {natural, *(_ENDED_BY_KILL if hits > spare or command.stage == "bad" else ())}


def none_was_alive_twice(evidence: Evidence) -> Iterator[Violation]:
    for told in evidence.testimony:
        if told.event == "doubled":
            yield Harm.DOUBLED, f"{told.run} attempt {told.attempt} found another one alive"


def at_most_once_is_at_most_once(evidence: Evidence) -> Iterator[Violation]:
    starts = Counter(t.run for t in evidence.testimony if t.event == "start")
    for record in fold(evidence.laptop.journal).values():
        count = starts[record.run_id]
        if record.line.startswith("sh:") and count > 1:
            yield Harm.DOUBLED, f"{record.run_id} was run {count} times"
        if record.result is Result.SUCCESS and record.attempt and not count:
            yield Harm.LOST, f"{record.run_id} ended in success and was never run"


def each_attempt_has_a_reason(evidence: Evidence) -> Iterator[Violation]:
    for record in fold(evidence.laptop.journal).values():
        stage = record.run_id.partition(".")[0]
        fails = {"flaky": 1, "bad": evidence.retries.get("bad", 0)}.get(stage, 0)
        # Each machine counts its own attempts; one that goes away costs one more.
        most = (1 + fails) * evidence.machines + evidence.hits.get(record.run_id, 0)
        if record.attempt > most:
            yield Harm.DOUBLED, f"{record.run_id} has {record.attempt} attempts, at most {most} due"


def runs_resume_from_their_newest_checkpoint(evidence: Evidence) -> Iterator[Violation]:
    newest: dict[tuple[str, str], int] = dict(evidence.arrived)
    for told in evidence.testimony:
        key = (told.machine, told.run)
        if told.event == "checkpoint":
            newest[key] = int(told.details[0])
        elif told.event == "resume" and int(told.details[0]) < newest.get(key, 0):
            yield (
                Harm.LOST,
                f"{told.run} attempt {told.attempt} on {told.machine} began at step"
                f" {told.details[0]}, though there was a checkpoint at {newest[key]}",
            )


def runs_use_the_payload_of_their_line(evidence: Evidence) -> Iterator[Violation]:
    versions: defaultdict[str, list[int]] = defaultdict(list)
    for appended in evidence.appended:
        versions[appended.line].append(appended.version)
    least = {}
    for number, record in sorted(fold(evidence.laptop.journal).items()):
        if versions[record.line]:
            least[number] = versions[record.line].pop(0)
    for told in evidence.testimony:
        if told.event == "start" and told.details:
            needed = least.get(RunId.parse(told.run).number, 0)
            if min(map(int, told.details)) < needed:
                yield Harm.LOST, f"{told.run} ran with payload {told.details}, not with {needed}"


def both_ends_tell_the_same(evidence: Evidence) -> Iterator[Violation]:
    laptop, vm = evidence.laptop, evidence.vm
    here, there = fold(laptop.journal), fold(vm.journal)
    if evidence.machines == 1 and {r.encode() for r in laptop.journal} != {
        r.encode() for r in vm.journal
    }:
        yield Harm.LOST, "the journals hold other records"
    for number in here.keys() | there.keys():
        if here.get(number) != there.get(number):
            yield Harm.LOST, f"command {number}: {here.get(number)} here, {there.get(number)} there"
    if laptop.results != vm.results:
        differing = {
            k for k in laptop.results | vm.results if laptop.results.get(k) != vm.results.get(k)
        }
        yield Harm.LOST, f"results.json differs: {sorted(differing)}"
    if vm.artifacts - laptop.artifacts:
        yield Harm.LOST, f"artefacts did not arrive: {sorted(vm.artifacts - laptop.artifacts)}"


def each_run_has_its_result(evidence: Evidence) -> Iterator[Violation]:
    for record in fold(evidence.laptop.journal).values():
        if record.state is not State.ENDED or not record.attempt:
            continue
        found = evidence.laptop.results.get(record.run_id)
        if found is None or found.result is not record.result:
            yield Harm.LOST, f"{record.run_id} ended as {record.result}; results.json: {found}"
        elif record.result is Result.SUCCESS and not record.line.startswith("sh:"):
            if found.report is None or found.report.metrics != {"attempt": float(record.attempt)}:
                yield Harm.LOST, f"{record.run_id} has lost its report"
            for size in ("small", "big"):
                stem = f"{record.run_id}/{size}-{record.attempt}-"
                if not any(path.startswith(stem) for path in evidence.laptop.artifacts):
                    yield Harm.LOST, f"{record.run_id} has lost its artefact {size}"


def logs_are_whole(evidence: Evidence) -> Iterator[Violation]:
    for name in evidence.laptop.logs.keys() | evidence.vm.logs.keys():
        here, there = (seen.logs.get(name, b"") for seen in (evidence.laptop, evidence.vm))
        if evidence.machines == 1 and here != there:
            yield Harm.LOST, f"{name} has {len(here)} bytes here and {len(there)} there, or others"
    for name, data in evidence.laptop.logs.items():
        lines = Counter(line for line in data.splitlines() if line.startswith(b"line "))
        for line, count in lines.items():
            if count > 1:
                yield Harm.DOUBLED, f"{name}: {count} times {line.decode('utf-8', 'replace')!r}"
    yield from _runs_are_in_logs(evidence.laptop)


def _runs_are_in_logs(seen: EndSeen) -> Iterator[Violation]:
    """What each run that ended in success wrote stands between its header and its trailer."""
    parts: dict[tuple[str, int], list[bytes]] = {}
    ended: set[tuple[str, int]] = set()
    for data in seen.logs.values():
        part: list[bytes] = []
        for line in data.splitlines():
            told = parse_log_line(line)
            if isinstance(told, LogStart):
                part = parts[told.run_id, told.attempt] = []
            elif isinstance(told, LogEnd):
                ended.add((told.run_id, told.attempt))
            else:
                part.append(line)
    for record in fold(seen.journal).values():
        key = (record.run_id, record.attempt)
        if record.result is Result.SUCCESS and record.attempt:
            if key not in parts or key not in ended:
                yield Harm.LOST, f"the log of {record.run_id} attempt {record.attempt} is not whole"
                continue
            steps = [int(line.split()[3]) for line in parts[key] if line.startswith(b"line ")]
            if steps and steps != list(range(steps[0], steps[-1] + 1)):
                yield Harm.LOST, f"the log of {record.run_id} lacks lines: {steps}"


def files_are_whole(evidence: Evidence) -> Iterator[Violation]:
    for bad in evidence.bad_looks:
        yield Harm.TORN, bad


def nothing_is_left(evidence: Evidence) -> Iterator[Violation]:
    for process in evidence.alive:
        yield Harm.DOUBLED, f"still alive: {process}"
    for path in evidence.leftovers:
        yield Harm.OTHER, f"left lying about: {path}"
    if evidence.objects >= MAX_OBJECTS:
        yield Harm.OTHER, f"a folder of the remote has {evidence.objects} objects"


def nobody_speaks_of_faults(evidence: Evidence) -> Iterator[Violation]:
    for text, count in Counter(evidence.said).items():
        yield Harm.OTHER, f"{text} ({count} times)"


CHECKS = (
    every_line_is_one_command,
    every_command_has_ended_once,
    results_are_right,
    none_was_alive_twice,
    at_most_once_is_at_most_once,
    each_attempt_has_a_reason,
    runs_resume_from_their_newest_checkpoint,
    runs_use_the_payload_of_their_line,
    both_ends_tell_the_same,
    each_run_has_its_result,
    logs_are_whole,
    files_are_whole,
    nothing_is_left,
    nobody_speaks_of_faults,
)
