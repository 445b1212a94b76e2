import base64
import codecs

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from protocol.errors import ConfigError
from protocol.queue import (
    MAX_LINE_BYTES,
    SETTLE_SECONDS,
    RunCommand,
    ShellCommand,
    StopCommand,
    encode_script,
    identity,
    lines_of,
    parse_command,
    parse_queue,
    readable,
    scan,
)

LINES = st.lists(st.sampled_from(["run:a", "run:b", "stop:a", "sh:bHM=", "nonsense"]), max_size=6)


def texts(data: bytes) -> list[str]:
    return [line.text for line in parse_queue(data)]


def test_the_three_verbs_are_parsed():
    assert parse_command("run:Fine Tune") == RunCommand("fine-tune")
    assert parse_command("  stop:pretrain ") == StopCommand("pretrain")
    assert parse_command(encode_script("echo é\n")) == ShellCommand("echo é\n")


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("pretrain", "not run:<stage>"),
        ("RUN:pretrain", "Write run: in lower case"),
        ("run:", "stage name ''"),
        ("run:../x", "stage name '../x'"),
        ("sh:", "no script follows"),
        ("sh:????", "broken base64"),
        ("sh:YQ", "broken base64"),
        ("sh:" + base64.b64encode(b"\xff").decode(), "the script is not UTF-8"),
        ("sh:" + base64.b64encode(b"a\0b").decode(), "NUL"),
        ("run:a\ud800", "stage name"),
    ],
)
def test_a_malformed_line_carries_its_reason(line: str, why: str):
    with pytest.raises(ConfigError) as caught:
        parse_command(line)
    assert why in str(caught.value)


def test_an_error_carries_the_line_number_and_spoils_no_other_line():
    first, second, third = parse_queue(b"# queue\n\nrun:a\nrun\nrun:b\n")
    assert (first.number, first.command) == (3, RunCommand("a"))
    assert (second.number, second.command) == (4, None)
    assert second.error.startswith("line 4: ")
    assert (third.number, third.command) == (5, RunCommand("b"))


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("train", "line 1: not run:<stage>, sh:<base64> or stop:<stage>"),
        (
            "RUN:a",
            "line 1: not run:<stage>, sh:<base64> or stop:<stage>. Write run: in lower case.",
        ),
        ("sh:", "line 1: sh: no script follows. Use `syncd sh 'COMMAND'`."),
        ("sh:AA==", "line 1: sh: the script holds a NUL character"),
    ],
)
def test_an_error_says_each_thing_once(line, error):
    assert parse_queue(f"{line}\n".encode())[0].error == error


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("run:pretrain", "run:pretrain"),
        (encode_script("nvidia-smi"), "sh: nvidia-smi"),
        (encode_script("\n  echo 1\n\n"), "sh: echo 1"),
        (encode_script("#!/bin/sh\necho 1\n"), "sh: #!/bin/sh ..."),
        (encode_script("echo \x1b[31m\tä"), "sh: echo \\x1b[31m\\tä"),
        (encode_script("\n"), encode_script("\n")),
        ("sh:not base64\x07", "sh:not base64\\x07"),
        ("", ""),
    ],
)
def test_a_line_can_be_read_by_a_person(line, shown):
    assert readable(line) == shown


@given(st.text())
def test_what_a_person_reads_is_one_printable_line(text):
    assert readable(text).isprintable()
    assert readable(encode_script(text.encode("utf-8", "replace").decode())).isprintable()


def test_a_line_that_is_not_utf8_is_an_error_that_can_be_shown():
    (line,) = parse_queue(b"run:caf\xe9\n")
    assert (line.text, line.command) == ("run:caf\\xe9", None)
    assert "not UTF-8" in line.error


def test_a_line_may_be_as_long_as_the_limit_and_no_longer():
    script = "x" * ((MAX_LINE_BYTES - 3) // 4 * 3 - 2)
    longest, longer = parse_queue(
        lines_of([encode_script(script), "run:" + "é" * 600_000]).encode()
    )
    assert longest.command == ShellCommand(script)
    assert f"longer than {MAX_LINE_BYTES} bytes" in longer.error


@pytest.mark.parametrize("ending", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize(
    "encode",
    [
        lambda text: text.encode(),
        lambda text: codecs.BOM_UTF8 + text.encode(),
        lambda text: text.encode("utf-16"),
        lambda text: codecs.BOM_UTF16_BE + text.encode("utf-16-be"),
    ],
)
def test_files_of_every_system_and_editor_say_the_same(ending: str, encode):
    data = encode(ending.join(["# é", "", " run:a \t", "stop:a", ""]))
    assert [(line.number, line.text) for line in parse_queue(data)] == [(3, "run:a"), (4, "stop:a")]
    assert all(line.finished for line in parse_queue(data))


def test_a_half_written_line_is_not_finished():
    assert [line.finished for line in parse_queue(b"run:a\nrun:pre")] == [True, False]


@given(st.binary(max_size=200))
@example(b"\xff\xfe\x00\xd8\n\x00")
@example(b"\xff\xfe")
@example(b"\xef\xbb\xbf\xef\xbb\xbfrun:a\n")
def test_any_bytes_are_lines_that_can_be_kept_and_sent(data: bytes):
    for line in parse_queue(data):
        assert (line.command is None) == bool(line.error)
        assert line.text == line.text.strip() != ""
        line.text.encode("utf-8")
        identity(line.text).encode("utf-8")


@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1))
def test_a_script_is_read_back_as_it_was_written(script: str):
    assume(script.strip())
    assert parse_command(encode_script(script)) == ShellCommand(script)


@pytest.mark.parametrize("script", [" ", "  \n", "\t\n\n"])
def test_a_script_of_blanks_is_none(script: str):
    with pytest.raises(ConfigError, match="the script is blank"):
        parse_command(encode_script(script))


def test_long_lines_are_known_by_their_hash():
    (line,) = parse_queue(lines_of([encode_script("x" * 100)]).encode())
    assert identity(line.text).startswith("sha256:")
    assert len(identity(line.text)) < 80


# Which lines are new. The table of examples in docs/protocol.md is executed by
# test_document.py; here stand the properties that it is an illustration of.


def settled(last: dict[str, int], lines: list[str]):
    return scan(last, parse_queue(lines_of(lines).encode()), unchanged_for=SETTLE_SECONDS)


@given(LINES)
def test_a_file_that_was_scanned_holds_nothing_new(lines: list[str]):
    first = settled({}, lines)
    assert [line.text for line in first.new] == lines
    again = settled(dict(first.counts), lines)
    assert (again.new, again.counts) == ((), first.counts)


@given(LINES, st.randoms(use_true_random=False))
def test_reordering_and_deleting_run_nothing_again(lines: list[str], random):
    last = dict(settled({}, lines).counts)
    kept = random.sample(lines, random.randint(0, len(lines)))
    assert settled(last, kept).new == ()


@given(LINES, LINES, st.randoms(use_true_random=False))
def test_what_was_added_anywhere_is_new_exactly_once(before: list[str], added: list[str], random):
    last = dict(settled({}, before).counts)
    lines = list(before)
    for line in added:
        lines.insert(random.randint(0, len(lines)), line)
    decision = scan(last, parse_queue(lines_of(lines).encode()), unchanged_for=0.0)
    assert sorted(line.text for line in decision.new) == sorted(added)
    assert [line.number for line in decision.new] == sorted(line.number for line in decision.new)
    assert not decision.settling


@given(LINES, st.integers(0, 60))
def test_a_file_that_is_written_anew_in_pieces_runs_nothing_again(lines: list[str], cut: int):
    whole = lines_of(lines).encode()
    last = dict(settled({}, lines).counts)
    partly = scan(last, parse_queue(whole[:cut]), unchanged_for=0.0)
    assert [line.text for line in partly.new] == []
    assert scan(dict(partly.counts), parse_queue(whole), unchanged_for=0.0).new == ()


@given(LINES, st.lists(st.integers(0, 60), max_size=5))
def test_a_line_that_grows_byte_by_byte_is_run_once_and_whole(lines: list[str], cuts: list[int]):
    whole = lines_of(lines).encode()
    counts: dict[str, int] = {}
    ran: list[str] = []
    for cut in [*sorted(cuts), len(whole)]:
        decision = scan(counts, parse_queue(whole[:cut]), unchanged_for=0.0)
        ran += [line.text for line in decision.new]
        counts = dict(decision.counts)
    assert ran == lines


def test_after_the_file_was_emptied_equal_text_is_new():
    last = dict(settled({}, ["run:a"]).counts)
    assert scan(last, [], unchanged_for=SETTLE_SECONDS - 0.1).counts == last
    emptied = scan(last, [], unchanged_for=SETTLE_SECONDS)
    assert emptied.counts == {}
    assert [line.text for line in settled(dict(emptied.counts), ["run:a"]).new] == ["run:a"]


def test_a_last_line_without_an_end_counts_once_it_has_settled_and_once_only():
    half = parse_queue(b"run:a\nrun:b")
    first = scan({}, half, unchanged_for=0.0)
    assert ([line.text for line in first.new], first.settling) == (["run:a"], True)
    second = scan(first.counts, half, unchanged_for=SETTLE_SECONDS)
    assert ([line.text for line in second.new], second.settling) == (["run:b"], False)
    third = scan(second.counts, half, unchanged_for=0.0)
    assert (third.new, third.counts) == ((), second.counts)
    ended = scan(third.counts, parse_queue(b"run:a\nrun:b\n"), unchanged_for=0.0)
    assert (ended.new, ended.counts) == ((), second.counts)
