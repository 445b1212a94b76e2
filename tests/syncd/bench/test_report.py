import json
import subprocess
import sys

import pytest
from reports import REPORT

from protocol.errors import DataError
from protocol.tables import markdown
from syncd.bench.report import print_table, read_report
from syncd.show import plain_console


def test_the_table_shows_each_figure(capsys):
    print_table(plain_console(), REPORT)
    shown = capsys.readouterr().out
    assert all(word in shown for word in ("append, p50", "the old system", "6,994", "cores 2"))


def test_a_kept_report_is_printed_as_markdown(tmp_path):
    path = tmp_path / "bench.json"
    path.write_text(json.dumps(REPORT.to_json()))
    done = subprocess.run(
        [sys.executable, "-m", "syncd.bench.report", str(path)], capture_output=True, check=True
    )
    assert done.stdout.decode() == markdown(REPORT)


@pytest.mark.parametrize("text", ["", "[]", '{"bench": "link"}', '{"figures": 1}'])
def test_what_is_no_report_is_refused_by_name(tmp_path, text):
    path = tmp_path / "bench.json"
    path.write_text(text)
    with pytest.raises(DataError, match=r"bench\.json"):
        read_report(path)


def test_a_report_that_is_not_there_is_a_users_error(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "syncd.bench.report", str(tmp_path / "none.json")],
        capture_output=True,
        check=False,
    )
    assert done.returncode == DataError.exit_code
    assert b"No such file" in done.stderr
