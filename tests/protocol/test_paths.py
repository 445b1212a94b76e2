from pathlib import Path

import pytest

from protocol.errors import ConfigError
from protocol.paths import Layout

LAYOUT = Layout(Path("root"))


def test_everything_lies_where_the_layout_says():
    found = {
        name: str(value.relative_to(LAYOUT.root))
        for name in dir(Layout)
        if isinstance(getattr(Layout, name), property)
        for value in [getattr(LAYOUT, name)]
    }
    assert found == {
        "queue": "queue.txt",
        "serve": "serve",
        "inbox": "in",
        "store": "store",
        "settings": "syncd.toml",
        "private": ".syncd",
        "key": ".syncd/key",
        "runs": ".syncd/runs",
        "fence": ".syncd/fenced.json",
        "left": ".syncd/left.json",
        "problems": ".syncd/problems.json",
        "unsent": ".syncd/unsent.json",
        "status": "in/status.txt",
        "results": "in/results.json",
        "journal": "in/journal.jsonl",
        "checkpoint_index": "in/checkpoints.json",
        "artifacts": "in/artifacts",
    }


def test_a_stage_has_one_log_however_it_is_spelled():
    assert LAYOUT.log("Fine_Tune") == LAYOUT.log("fine-tune") == LAYOUT.inbox / "fine-tune.log"


def test_the_log_of_a_shell_command_is_never_the_log_of_a_stage():
    path = LAYOUT.shell_log(3)
    assert path == LAYOUT.inbox / "sh-3.log"
    with pytest.raises(ConfigError):
        LAYOUT.log(path.stem)


def test_a_run_writes_to_the_log_of_its_stage_and_a_shell_command_to_one_of_its_own(tmp_path):
    layout = Layout(tmp_path)
    assert layout.run_log("pretrain.0012.7f3a") == layout.log("pretrain")
    assert layout.run_log("sh.0005.7f3a") == layout.shell_log(5)
