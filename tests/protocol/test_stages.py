import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from protocol.errors import ConfigError
from protocol.stages import MAX_BYTES, Resume, Stage, parse_stages


def one(text: str) -> Stage:
    (stage,) = parse_stages(f"[stages.pretrain]\n{text}".encode()).values()
    return stage


def test_a_stage_takes_its_defaults():
    assert one('command = "true"') == Stage(name="pretrain", command="true")
    stage = one('command = "true"')
    assert (stage.gpu, stage.retries, stage.grace, stage.timeout) == (1.0, 0, 10.0, None)


def test_every_key_is_read():
    data = b"""
    [stages.pretrain]
    command = "true"

    [stages."Fine Tune"]
    command = ["python", "-m", "trainer"]
    env = { THREADS = 2, RATE = 0.5, FLAG = true, TEXT = "x" }
    after = "Pretrain"
    timeout = "90m"
    retries = 2
    grace = 30
    resume = "restart"
    gpu = 0.5
    """
    assert parse_stages(data)["fine-tune"] == Stage(
        name="fine-tune",
        command=("python", "-m", "trainer"),
        env={"THREADS": "2", "RATE": "0.5", "FLAG": "1", "TEXT": "x"},
        after=("pretrain",),
        timeout=5400.0,
        retries=2,
        grace=30.0,
        resume=Resume.RESTART,
        gpu=0.5,
    )


@pytest.mark.parametrize(
    ("text", "seconds"), [("1", 1.0), ('"45 s"', 45.0), ('"1.5h"', 5400.0), ('"2d"', 172_800.0)]
)
def test_a_duration_has_a_unit_or_is_in_seconds(text: str, seconds: float):
    assert one(f'command = "x"\ntimeout = {text}').timeout == seconds


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "command"),
        ('command = " "', "command"),
        ("command = []", "command"),
        ('command = ["a", 1]', "command"),
        ('command = "a\\u0000b"', "command"),
        ('command = "x"\ngpu = 1.5', "gpu"),
        ('command = "x"\ngpu = nan', "gpu"),
        ('command = "x"\nretries = -1', "retries"),
        ('command = "x"\nretries = 1.0', "retries"),
        ('command = "x"\nresume = "maybe"', "checkpoint or restart"),
        ('command = "x"\nresume = []', "checkpoint or restart"),
        ('command = "x"\ntimeout = "soon"', "timeout"),
        ('command = "x"\ntimeout = 0', "timeout"),
        ('command = "x"\ntimeout = nan', "timeout"),
        (f'command = "x"\ntimeout = 1{"0" * 400}', "timeout"),
        (f'command = "x"\nretries = 0x{"f" * 5000}', "digits"),
        ('command = "x"\nafter = [1]', "after"),
        ('command = "x"\nafter = ["nothing"]', "not a stage"),
        ('command = "x"\nenv = {A = []}', "env"),
        ('command = "x"\nenv = {"" = "1"}', "env"),
        ('command = "x"\nenv = {"A=B" = "1"}', "env"),
        ('command = "x"\ncomand = "y"', "Did you mean 'command'"),
    ],
)
def test_a_wrong_field_is_named_with_what_would_be_right(text: str, told: str):
    with pytest.raises(ConfigError) as caught:
        one(text)
    assert told in str(caught.value)


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (b"", "must hold tables"),
        (b"stages = 3", "must hold tables"),
        (b"x = 1\n[stages]", "must hold tables"),
        (b"[stages]\npretrain = 3", "not a table"),
        (b"[stages", "at the end, line 1"),
        (b"[stages.a]\n\ncommand =\n\n", "line 3"),
        (b"\xff", "stages.toml"),
        (b"x = " + b"[" * 100_000, "stages.toml"),
        (b"#" * (MAX_BYTES + 1), f"larger than {MAX_BYTES} bytes"),
        (b'[stages."a b"]\ncommand="x"\n[stages.a_b]\ncommand="x"', "the same stage"),
        (b'[stages.sh]\ncommand="x"', "sh: commands"),
        (b'[stages."../a"]\ncommand="x"', "stage name"),
    ],
)
def test_a_wrong_file_is_refused_with_the_reason(data: bytes, told: str):
    with pytest.raises(ConfigError) as caught:
        parse_stages(data)
    assert told in str(caught.value)


def test_a_cycle_is_shown_as_one():
    data = b"""
    [stages.a]
    command = "x"
    after = ["b"]
    [stages.b]
    command = "x"
    after = ["a"]
    """
    with pytest.raises(ConfigError, match=r"a cycle: (a after b after a|b after a after b)"):
        parse_stages(data)


VALUES = st.sampled_from(
    [
        '"x"',
        "1",
        "-1",
        "1.5",
        "nan",
        "inf",
        "true",
        "[]",
        "{}",
        '["a"]',
        "2020-01-01",
        '"9h"',
        "{a=1}",
    ]
)
KEYS = st.sampled_from(
    ["command", "env", "after", "timeout", "retries", "grace", "resume", "gpu", "other"]
)


@given(st.dictionaries(KEYS, VALUES, max_size=6))
def test_any_table_is_a_stage_or_a_config_error(table: dict[str, str]):
    lines = [f"{key} = {value}" for key, value in {"command": '"x"', **table}.items()]
    try:
        stage = one("\n".join(lines))
    except ConfigError:
        return
    assert 0 <= stage.gpu <= 1
    assert stage.timeout is None or stage.timeout > 0


@given(st.binary(max_size=100) | st.text(max_size=100).map(lambda t: t.encode("utf-8", "replace")))
@example(b"[stages]\n")
def test_any_bytes_are_stages_or_a_config_error(data: bytes):
    try:
        assert isinstance(parse_stages(data), dict)
    except ConfigError:
        return
