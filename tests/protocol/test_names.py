import unicodedata

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from protocol.errors import ConfigError, RefusedError
from protocol.names import (
    MAX_COMPONENT_BYTES,
    MAX_PATH_BYTES,
    MAX_RUN_ID_LENGTH,
    MAX_STAGE_LENGTH,
    RunId,
    canonical_stage,
    canonical_stages,
    safe_relative,
    suggest,
)

NONCES = st.text("0123456789abcdef", min_size=4, max_size=8)
STAGES = st.from_regex(r"[a-z0-9]{1,8}(-[a-z0-9]{1,8}){0,3}", fullmatch=True).filter(
    lambda s: s not in ("con", "prn", "aux", "nul") and not s.startswith(("com", "lpt", "sh-"))
)


@pytest.mark.parametrize(
    "name", ["fine-tune", "Fine Tune", "fine_tune", " FINE - tune ", "ｆine-tune"]
)
def test_spellings_of_one_stage_have_one_canonical_form(name: str):
    assert canonical_stage(name) == "fine-tune"


@pytest.mark.parametrize(
    "name",
    [
        "",
        " ",
        "-",
        "a--",
        "../a",
        "a/b",
        "a.b",
        "é",
        "con",
        "COM1",
        "lpt²",
        "sh-3",
        "sh 3",
        "a" * 65,
    ],
)
def test_a_name_of_which_nothing_legal_can_be_made_is_refused(name: str):
    with pytest.raises(ConfigError):
        canonical_stage(name)


def test_a_name_of_the_greatest_length_is_legal():
    assert canonical_stage("a" * MAX_STAGE_LENGTH) == "a" * MAX_STAGE_LENGTH


@given(st.text())
@example("\ud800")
def test_a_canonical_form_is_its_own_canonical_form(name: str):
    try:
        canonical = canonical_stage(name)
    except ConfigError:
        return
    assert canonical_stage(canonical) == canonical
    assert canonical.isascii()


def test_two_names_that_would_be_one_stage_are_refused_when_they_are_defined():
    assert canonical_stages(["Fine Tune", "gate"]) == {"fine-tune": "Fine Tune", "gate": "gate"}
    with pytest.raises(ConfigError, match=r"fine_tune.*same stage as 'Fine Tune'"):
        canonical_stages(["Fine Tune", "fine_tune"])


def test_no_stage_may_have_the_name_of_shell_commands():
    with pytest.raises(ConfigError, match="sh: commands"):
        canonical_stages(["SH"])


def test_a_hint_names_the_nearest_stage_or_all_of_them():
    assert suggest("pretrian", ["pretrain", "gate"]) == "Did you mean 'pretrain'?"
    assert suggest("zzz", ["pretrain", "gate"]) == "Known stages: gate, pretrain."
    assert suggest("zzz", []) == "No stage is defined yet."


@given(STAGES, st.integers(0, 10**12 - 1), NONCES, st.just("") | STAGES)
def test_a_run_id_is_read_back_as_it_was_written(stage: str, number: int, origin: str, arm: str):
    run_id = RunId(stage=stage, number=number, origin=origin, arm=arm)
    assert RunId.parse(str(run_id)) == run_id


@pytest.mark.parametrize(
    "text",
    [
        "",
        "pretrain",
        "pretrain.1",
        "pretrain.1.xyz!",
        "pretrain.1.7f3a.",
        "pretrain.-1.7f3a",
        "pretrain.١.7f3a",
        "pretrain.1.7f3a\n",
        "../pretrain.1.7f3a",
        f"pretrain.{'1' * 5000}.7f3a",
        f"{'a' * MAX_RUN_ID_LENGTH}.1.7f3a",
    ],
)
def test_what_is_no_run_id_is_refused(text: str):
    with pytest.raises(RefusedError, match="run id"):
        RunId.parse(text)


@pytest.mark.parametrize(
    "path",
    ["a", "a/b.txt", "in/pretrain.log", "é/日本", ".hidden", "a b/c", "x" * MAX_COMPONENT_BYTES],
)
def test_a_path_inside_the_tree_is_safe(path: str):
    assert safe_relative(path) == path


@pytest.mark.parametrize(
    "path",
    [
        "",
        "/etc/passwd",
        "../x",
        "a/../b",
        "a/./b",
        "a//b",
        "a/",
        "a\\b",
        "C:x",
        "a\nb",
        "a\0b",
        "a\x7fb",
        "a?",
        "a.",
        "a ",
        "a /b",
        "nul",
        "NUL.txt",
        "a/con.tar.gz",
        "\ud800",
        "x" * (MAX_COMPONENT_BYTES + 1),
        "x/" * (MAX_PATH_BYTES // 2) + "x",
    ],
)
def test_a_path_that_could_leave_the_tree_or_cannot_exist_everywhere_is_refused(path: str):
    with pytest.raises(RefusedError, match="path"):
        safe_relative(path)


@given(st.text(max_size=40) | st.lists(st.sampled_from(["..", ".", "", "a", "b\\"])).map("/".join))
def test_every_path_that_passes_is_relative_and_stays_inside(path: str):
    try:
        safe_relative(path)
    except RefusedError:
        return
    assert not path.startswith("/")
    assert not {"", ".", ".."} & set(path.split("/"))
    assert not any(unicodedata.category(c) == "Cc" for c in path)
