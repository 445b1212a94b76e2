"""A VM is given the sections of rclone's configuration that its remotes need, and no others."""

from __future__ import annotations

import subprocess
from pathlib import Path

from syncd.notebook.rclone_config import excerpt, needed_sections
from syncd.rclone.binary import find_rclone
from syncd.rclone.rcd import Rclone

CONFIG = """\
[drive]
type = drive
token = {"access_token":"a","refresh_token":"r","expiry":"2026-01-01T00:00:00Z"}

[secret drive]
type = crypt
remote = drive:deep/er
password = aBcD

[both]
type = union
upstreams = "secret drive:x y" other:

[other]
type = sftp
host = example.org
key_file = ~/.ssh/id

[unused]
type = local
"""


def test_what_a_remote_wraps_is_needed_too(rclone: Rclone, rclone_config: Path) -> None:
    rclone_config.write_text(CONFIG)
    found = excerpt(rclone, ["both:syncd"])
    heads = [line for line in found.text.splitlines() if line.startswith("[")]
    assert set(heads) == {"[both]", "[secret drive]", "[drive]", "[other]"}
    assert "unused" not in found.text


def test_it_is_a_configuration_that_rclone_reads_as_it_was(
    rclone: Rclone, rclone_config: Path, tmp_path: Path
) -> None:
    rclone_config.write_text(CONFIG)
    copy = tmp_path / "copy.conf"
    copy.write_text(excerpt(rclone, ["both:"]).text)
    for name in ("drive", "secret drive", "both", "other"):
        shown = [
            subprocess.run(
                [find_rclone(), "config", "show", name, "--config", config],
                capture_output=True,
                check=True,
            ).stdout.splitlines()
            for config in (rclone_config, copy)
        ]
        assert sorted(shown[0]) == sorted(shown[1])


def test_a_file_that_the_vm_does_not_have_is_named(rclone: Rclone, rclone_config: Path) -> None:
    rclone_config.write_text(CONFIG)
    (note,) = excerpt(rclone, ["other:"]).notes
    assert "~/.ssh/id" in note
    assert "key_file" in note
    assert excerpt(rclone, ["drive:"]).notes == ()


def test_remotes_that_wrap_each_other_end() -> None:
    sections = {"a": {"remote": "b:"}, "b": {"remote": "a:x"}}
    assert needed_sections(sections, ["a:"]) == ["a", "b"]
    assert needed_sections(sections, [":webdav,url='http://x/':", "/a/b"]) == []
