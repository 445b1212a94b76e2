"""Settings, where each comes from; and the key, which nothing ever shows."""

from __future__ import annotations

import dataclasses
import stat
import subprocess
import tomllib
import traceback
from dataclasses import replace

import pytest

from protocol.errors import ConfigError
from protocol.paths import Layout
from protocol.wire import Role
from syncd.config import (
    UNSEALED_FOLDER,
    Key,
    Settings,
    drop_previous,
    load_key,
    load_settings,
    make_private,
    previous_sealer,
    read_key,
    required_key,
    sealer,
    toml_text,
)
from syncd.rclone.binary import find_rclone

# For each setting: as a flag, in the environment, in the file, and what each then is.
CASES = {
    "role": ((Role.WORKER, "worker", '"worker"'), Role.WORKER),
    "remote": (("drive:x", "drive:x", '"drive:x"'), "drive:x"),
    "rclone_config": (("/a b", "/a b", '"/a b"'), "/a b"),
    "stages": ((("pretrain",), "Pre Train, gate", '["Pre Train"]'), None),
    "shell": ((False, "no", "false"), False),
    "unsealed_lines": ((True, "yes", "true"), True),
    "unsealed": ((True, "yes", "true"), True),
    "bwlimit": (("1M", "1M", '"1M"'), "1M"),
    "poll": ((2.5, "2.5", "2.5"), 2.5),
    "idle_after": ((60.0, "60", "60"), 60.0),
    "profile": (("drive", "drive", '"drive"'), "drive"),
    "stop_when_idle": (("30m", "0.5h", '"30m"'), 1800.0),
    "fallback": ((("drive:x",), "drive:x", '["drive:x"]'), ("drive:x",)),
}
BASE = {"role": "controller", "remote": "base:"}


@pytest.fixture
def layout(tmp_path):
    return Layout(tmp_path)


def write(layout, **settings):
    lines = [f"{name} = {text}\n" for name, text in settings.items()]
    layout.settings.write_text("".join(lines), "utf-8")


@pytest.mark.parametrize(
    "rate",
    ["", "off", "0", "10", "1M", "1.5G", "10b", "1Mi", "500k:2M", "off:1M", "08:00,512k 23:30,off",
     "Mon-00:00,512 Fri-23:59,10M:off"],
)  # fmt: skip
def test_rclone_takes_each_rate_that_we_take(layout, rate):
    write(layout, role='"worker"', remote='"d:"', bwlimit=f'"{rate}"')
    assert load_settings(layout, {}, {}).bwlimit == rate
    command = [find_rclone(), "version", *(["--bwlimit", rate] if rate else [])]
    assert subprocess.run(command, capture_output=True, check=False).returncode == 0


@pytest.mark.parametrize("rate", ["fast", "1M:", "5Mib/s", "-1", "1 M", "8:00,1M", "1M,2M"])
def test_a_rate_that_is_none_is_named(layout, rate):
    write(layout, role='"worker"', remote='"d:"', bwlimit=f'"{rate}"')
    with pytest.raises(ConfigError, match=f"bwlimit = '{rate}' is no rate: 1M is a MiB a second"):
        load_settings(layout, {}, {})


def test_an_end_without_a_key_starts_only_where_the_settings_say_so(layout):
    sealed = Settings(role=Role.WORKER, remote="d:")
    with pytest.raises(ConfigError, match="there is no key"):
        required_key(layout, sealed, {"SYNCD_KEY": ""})
    assert required_key(layout, replace(sealed, unsealed=True), {}) is None
    key = Key.new()
    assert required_key(layout, sealed, {"SYNCD_KEY": key.text()}) == key
    assert required_key(layout, replace(sealed, unsealed=True), {"SYNCD_KEY": key.text()}) == key


@pytest.mark.parametrize("fallback", [("d:",), ("e:", "f:", "e:")])
def test_a_remote_is_named_once(fallback):
    with pytest.raises(ConfigError, match="fallback names a remote twice, or the first one"):
        Settings(role=Role.WORKER, remote="d:", fallback=fallback)


def test_every_setting_has_a_case():
    assert set(CASES) == {field.name for field in dataclasses.fields(Settings)}


@pytest.mark.parametrize("name", CASES)
def test_a_flag_goes_before_the_environment_before_the_file_before_the_default(layout, name):
    (flag, variable, text), wanted = CASES[name]
    default = Settings(role=Role.CONTROLLER, remote="base:")
    environ = {f"SYNCD_{k.upper()}": v for k, v in BASE.items()}
    assert getattr(load_settings(layout, {}, environ), name) == getattr(default, name)
    environ.pop(f"SYNCD_{name.upper()}", None)
    write(layout, **{name: text})
    in_file = ("pre-train",) if name == "stages" else wanted
    assert getattr(load_settings(layout, {}, environ), name) == in_file
    # What stands below is wrong: it is not even looked at.
    write(layout, **{name: "1979-05-27"})
    environ[f"SYNCD_{name.upper()}"] = variable
    in_environ = ("pre-train", "gate") if name == "stages" else wanted
    assert getattr(load_settings(layout, {}, environ), name) == in_environ
    environ[f"SYNCD_{name.upper()}"] = "\x07"
    in_flag = ("pretrain",) if name == "stages" else wanted
    assert getattr(load_settings(layout, {name: flag}, environ), name) == in_flag


@pytest.mark.parametrize("missing", ["role", "remote"])
def test_what_must_be_set_is_asked_for(layout, missing):
    flags = {name: value for name, value in BASE.items() if name != missing}
    told = rf"syncd\.toml: {missing} is not set.*set SYNCD_{missing.upper()}"
    with pytest.raises(ConfigError, match=told):
        load_settings(layout, flags, {})


def test_what_is_known_of_the_role_is_taken_where_nothing_else_says_it(layout):
    known = {"role": Role.WORKER}
    assert load_settings(layout, {"remote": "x"}, {}, **known).role is Role.WORKER
    environ = {"SYNCD_ROLE": "controller", "SYNCD_REMOTE": "x"}
    assert load_settings(layout, {}, environ, **known).role is Role.CONTROLLER


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        ("role", '"master"', "role = 'master' is not controller or worker"),
        ("remote", "5", "remote = 5 is not text"),
        ("remote", '"a\\nb"', "is not text of one line"),
        ("shell", '"maybe"', "shell = 'maybe' is not true or false"),
        ("shell", "1", "shell = 1 is not true or false"),
        ("poll", '"soon"', "poll = 'soon' is not 0, nor 0.05 to 3600 seconds"),
        ("poll", "true", "poll = True is not"),
        ("poll", "nan", "poll = nan is not"),
        ("poll", "0.01", "poll = 0.01 is not"),
        ("idle_after", "-1", "idle_after = -1 is not"),
        ("stop_when_idle", '"soon"', "stop_when_idle = 'soon' is no duration"),
        ("stop_when_idle", "-1", "stop_when_idle = -1 is no duration"),
        ("profile", '"floppy"', "profile = 'floppy' is no type of remote"),
        ("fallback", '["drive:x", 3]', "is not a list of remotes"),
        ("stages", "[1]", r"stages = \[1\] is not a list of stage names"),
        ("stages", '["a/b"]', "stages: stage name 'a/b'"),
        ("bwlimit", "1", "bwlimit = 1 is not text"),
    ],
)
def test_a_wrong_value_is_named_with_where_it_stands(layout, name, text, why):
    write(layout, **{name: text})
    flags = {k: v for k, v in BASE.items() if k != name}
    with pytest.raises(ConfigError, match=why) as caught:
        load_settings(layout, flags, {})
    assert caught.value.path == str(layout.settings)


def test_a_wrong_value_of_the_environment_or_a_flag_is_named_as_such(layout):
    with pytest.raises(ConfigError, match=r"\$SYNCD_POLL: poll = 'x'"):
        load_settings(layout, BASE, {"SYNCD_POLL": "x"})
    with pytest.raises(ConfigError, match="--poll: poll = 'x'"):
        load_settings(layout, {**BASE, "poll": "x"}, {})


def test_an_unknown_key_is_named_with_the_nearest_known_one(layout):
    layout.settings.write_text('remot = "x"\n')
    with pytest.raises(ConfigError, match=r"unknown key 'remot'. Did you mean 'remote'\?"):
        load_settings(layout, BASE, {})
    layout.settings.write_text("zzz = 1\n")
    with pytest.raises(ConfigError, match="Known settings: bwlimit"):
        load_settings(layout, BASE, {})


@pytest.mark.parametrize("content", [b"role = ", b"\xff\xfe", b"[[role"])
def test_a_file_that_is_no_toml_is_named(layout, content):
    layout.settings.write_bytes(content)
    with pytest.raises(ConfigError, match=r"read the settings: .*syncd\.toml"):
        load_settings(layout, BASE, {})


@pytest.mark.parametrize(
    "settings",
    [
        Settings(role=Role.CONTROLLER, remote="drive:syncd"),
        Settings(
            role=Role.WORKER, remote=':webdav,url="http://x/\\":', rclone_config="/ä \\n\"'",
            stages=("pretrain", "gate"), shell=False, bwlimit="1M", poll=0.5,
        ),
    ],
)  # fmt: skip
def test_written_settings_are_read_as_they_were(layout, settings):
    layout.settings.write_text(toml_text(settings), "utf-8")
    assert load_settings(layout, {}, {}) == settings
    assert set(tomllib.loads(toml_text(settings))) <= set(CASES)


# The key


def test_a_key_is_read_as_it_was_written_and_only_by_its_owner(layout):
    key = Key.new()
    key.save(layout)
    assert load_key(layout, {}) == key
    assert stat.S_IMODE(layout.key.stat().st_mode) == 0o600
    assert stat.S_IMODE(layout.private.stat().st_mode) == 0o700


def test_a_private_folder_that_was_open_is_closed(layout):
    layout.private.mkdir(mode=0o755)
    make_private(layout)
    assert stat.S_IMODE(layout.private.stat().st_mode) == 0o700


def test_the_environments_key_goes_before_the_files(layout):
    Key.new().save(layout)
    other = Key.new()
    assert load_key(layout, {"SYNCD_KEY": f" {other.text()}"}) == other


def test_no_key_is_none_and_seals_nothing(layout):
    assert load_key(layout, {}) is None
    assert (sealer(None).folder, sealer(None).key) == (UNSEALED_FOLDER, b"")
    key = Key.new()
    assert (sealer(key).folder, sealer(key).key) == (key.folder, key.secret)


def wrong_keys(line):
    return [
        "", "syncd1", line[:-1], line[:-9], line[1:], f"{line}=", f"{line} {line}",
        line.replace("syncd1", "syncd2"), line.replace(".", ":"), line[:-5] + "é" + line[-4:],
        line[:40] + "+" + line[41:], line[:40] + "!" + line[40:], line.replace(".", "..", 1),
    ]  # fmt: skip


@pytest.mark.parametrize("place", range(13))
def test_a_key_that_is_wrong_or_cut_short_is_refused_and_never_shown(layout, place):
    line = Key.new().text().strip()
    wrong = wrong_keys(line)[place]
    make_private(layout)
    layout.key.write_text(wrong, "utf-8")
    for load, origin in [
        (lambda: load_key(layout, {}), str(layout.key)),
        (lambda: load_key(layout, {"SYNCD_KEY": wrong or "x"}), "$SYNCD_KEY"),
    ]:
        with pytest.raises(ConfigError, match="read the key") as caught:
            load()
        told = "".join(traceback.format_exception(caught.value))
        assert line.rpartition(".")[2][8:20] not in told
        assert caught.value.path == origin


def test_a_key_that_is_being_rotated_has_two_lines_or_two_words(layout):
    key = Key.new().rotated()
    key.save(layout)
    assert load_key(layout, {}) == key
    one, two = key.text().splitlines()
    assert load_key(layout, {"SYNCD_KEY": f"{one} {two}"}) == key
    assert (sealer(key).key, previous_sealer(key).key) == (key.secret, key.previous)
    assert previous_sealer(Key.parse(one)) is None
    other = Key.new().text()
    for wrong in (f"{one}\n{other}", f"{one}\n{one}", f"{one}\n{two}\n{two}"):
        with pytest.raises(ConfigError, match="not a key of ours"):
            Key.parse(wrong)


def test_only_the_very_key_that_is_in_use_loses_its_previous_one(layout):
    key = Key.new().rotated()
    key.save(layout)
    assert not drop_previous(layout, Key.new().rotated())
    assert load_key(layout, {}) == key
    assert drop_previous(layout, key)
    assert load_key(layout, {}) == Key(key.folder, key.secret)
    assert not drop_previous(layout, key)
    layout.key.unlink()
    assert not drop_previous(layout, key)


def test_a_key_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(ConfigError, match="No such file"):
        read_key(tmp_path / "none")
    with pytest.raises(ConfigError, match="Is a directory"):
        read_key(tmp_path)


def test_a_key_shows_its_folder_and_not_itself():
    key = Key.new()
    for text in (repr(key), str(key), f"{key}", "%s" % key, repr([key])):  # noqa: UP031
        assert key.folder in text
        assert repr(key.secret)[2:10] not in text
        assert key.text().strip().rpartition(".")[2] not in text


def test_two_keys_are_different():
    assert len({Key.new().text() for _ in range(50)}) == 50
